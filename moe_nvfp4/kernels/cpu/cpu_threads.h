/* The threads of the CPU backend (cpu.c includes this file). A job is a sequence of phases, and a phase is a set of
   items, which threads take as they become free.

   The threads are those of torch's pool (GOMP_parallel, of the OpenMP runtime that torch has loaded), because a second
   pool would compete with its spinning threads. There is also a pool of our own: for machines without such a runtime,
   and for calls from threads that are not torch's (of a CUDA stream), for which OpenMP would make a second pool. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
enum { MAX_THREADS = 256, MAX_PHASES = 24 };

typedef void Task(const void *problem, int64_t item, int64_t next, int thread); /* next: this thread's next item */
typedef void Fetch(const void *problem, int64_t item); /* bring what the item reads into the cache */
typedef void Parallel(void (*)(void *), void *, unsigned threads, unsigned flags);
/* Variables that all threads write have a cache line each. */
typedef struct { _Alignas(64) atomic_long next; } Share;
typedef struct {
    Task *task;
    Fetch *fetch; /* or NULL */
    const void *problem;
    int64_t items, shares, threads;
    Share *own; /* [threads], or NULL: each thread begins with the same part of the items in every job, whose memory its
                   core's cache may have */
    _Alignas(64) atomic_long next;
    _Alignas(64) atomic_long done;
} Phase;
typedef struct { Phase phases[MAX_PHASES]; int64_t count, threads; _Alignas(64) atomic_long joined; } Job;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The number of this thread in the pool below, the same for all jobs; -1 elsewhere. */
static _Thread_local int place = -1;

/* Takes an item of the thread's own share, or else of another's. */
static int64_t claim_own(Phase *p, int thread, int64_t *end) {
    for (int64_t v = 0, n = p->threads; v < n; v++) {
        int64_t s = ((place < 0 ? thread : place) + v) % n, begin = s * p->items / n, size = (s + 1) * p->items / n - begin;
        if (atomic_load(&p->own[s].next) >= size) continue;
        int64_t i = atomic_fetch_add(&p->own[s].next, 1);
        if (i < size) return *end = begin + i + 1, begin + i;
    }
    return *end = p->items;
}

/* Takes some neighbouring items, so that prefetching beyond one pays; ever fewer, so that all threads end together. */
static int64_t claim(Phase *p, int thread, int64_t *end) {
    if (p->own) return claim_own(p, thread, end);
    long i = atomic_load(&p->next);
    do *end = MIN(i + (p->items - i) / p->shares + 1, p->items);
    while (i < p->items && !atomic_compare_exchange_weak(&p->next, &i, *end));
    return i;
}

/* Items that a thread has claimed before their phase has begun. */
typedef struct { Phase *phase; int64_t begin, end; } Early;

/* For a thread with nothing to do until `p` is over: claims items of the next phase that can be fetched, and fetches
   them. Otherwise memory would idle while the last items are worked on. */
static void look_ahead(const Job *job, const Phase *p, int thread, Early *early) {
    if (early->phase <= p) {
        Phase *q = (Phase *)p + 1;
        while (q < job->phases + job->count && !q->fetch) q++;
        if (q == job->phases + job->count) return;
        early->phase = q, early->begin = claim(q, thread, &early->end);
    }
    for (int64_t i = early->begin; i < early->end && atomic_load(&p->done) < p->items; i++)
        early->phase->fetch(early->phase->problem, i);
}

/* Every thread goes through all phases. A late thread finds little left to do, and no other waits for it: a phase is
   over when its items are done, whoever did them. */
static void work_off(void *argument) {
    Job *job = argument;
    int thread = (int)atomic_fetch_add(&job->joined, 1);
    Early early = {NULL, 0, 0};
    if (thread >= job->threads) return; /* there is no scratch for more */
    for (Phase *p = job->phases; p < job->phases + job->count; p++) {
        int64_t end = early.end, later_end, i = early.phase == p ? early.begin : claim(p, thread, &end);
        while (i < end) {
            int64_t later = claim(p, thread, &later_end);
            for (int64_t j = i; j < end; j++)
                p->task(p->problem, j, j + 1 < end ? j + 1 : later < p->items ? later : j, thread);
            atomic_fetch_add(&p->done, end - i);
            i = later, end = later_end;
        }
        if (atomic_load(&p->done) < p->items) look_ahead(job, p, thread, &early);
        for (int spins = 0; atomic_load(&p->done) < p->items;)
            if (++spins > 1 << 16) sched_yield(); /* not at once: it may give away a whole time slice */
            else relax();
    }
}

static Phase *add_phase(Job *job, Task *task, const void *problem, int64_t items, int64_t numbers, int64_t threads) {
    int64_t alone = numbers < 1 << 14; /* too little work for a second thread */
    Phase *p = &job->phases[job->count++];
    p->task = task, p->fetch = NULL, p->problem = problem, p->items = items, p->shares = alone ? 1 : 8 * threads;
    p->threads = threads, p->own = NULL;
    atomic_init(&p->next, 0), atomic_init(&p->done, 0);
    return p;
}

static void give_shares(Phase *p, Share *own) {
    for (int64_t s = 0; s < p->threads; s++) atomic_init(&own[s].next, 0);
    p->own = own;
}

/* ---- a pool of our own: its threads look for the next job for a while, then sleep ---- */

/* How often a thread looks for a job before it sleeps: for 0.5 to 1 ms, longer than a GPU takes from one layer's
   experts to the next layer's. */
enum { LOOKS = 1 << 14 };

static struct {
    pthread_mutex_t turn, lock; /* turn: held while a job runs; lock: for `wake` */
    pthread_cond_t wake;
    int64_t threads;
    _Alignas(64) atomic_ulong jobs; /* how many there were so far */
    _Atomic(Job *) job;
    _Alignas(64) atomic_long inside, asleep; /* how many threads may be using `job`; how many sleep */
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void *wait_for_jobs(void *seen_before_and_place) {
    place = (int)((uintptr_t)seen_before_and_place % MAX_THREADS);
    for (unsigned long seen = (unsigned long)((uintptr_t)seen_before_and_place / MAX_THREADS);;) {
        for (int looks = 0; looks < LOOKS && atomic_load(&pool.jobs) == seen; looks++) relax();
        if (atomic_load(&pool.jobs) == seen) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.asleep, 1); /* must come before the next look: see run_in_pool */
            while (atomic_load(&pool.jobs) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.jobs);
        atomic_fetch_add(&pool.inside, 1); /* must come before the look whether the job is still there */
        Job *job = atomic_load(&pool.job);
        if (job) work_off(job);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static void forget_pool(void) { /* a forked process does not have the threads */
    pthread_mutex_init(&pool.turn, NULL), pthread_mutex_init(&pool.lock, NULL), pthread_cond_init(&pool.wake, NULL);
    pool.threads = 0;
    atomic_store(&pool.inside, 0), atomic_store(&pool.asleep, 0), atomic_store(&pool.job, NULL);
}

static void run_in_pool(Job *job) {
    static int registered;
    pthread_mutex_lock(&pool.turn);
    place = 0;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_pool);
    while (pool.threads < job->threads - 1) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)(atomic_load(&pool.jobs) * MAX_THREADS + (unsigned long)pool.threads + 1);
        if (pthread_create(&thread, NULL, wait_for_jobs, seen)) break;
        pthread_detach(thread);
        pool.threads++;
    }
    atomic_store(&pool.job, job);
    atomic_fetch_add(&pool.jobs, 1);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work_off(job);
    atomic_store(&pool.job, NULL);
    while (atomic_load(&pool.inside)) sched_yield();
    place = -1;
    pthread_mutex_unlock(&pool.turn);
}

static void run_job(Job *job, int64_t threads, Parallel *parallel) {
    int64_t most = 1;
    for (Phase *p = job->phases; p < job->phases + job->count; p++)
        if (p->shares > 1 && p->items > most) most = p->items;
    job->threads = MIN(threads, most);
    if (job->threads <= 1) work_off(job);
    else if (parallel) parallel(work_off, job, (unsigned)job->threads, 0);
    else run_in_pool(job);
}
