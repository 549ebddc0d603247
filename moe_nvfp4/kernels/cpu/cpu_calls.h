/* Programs that a CUDA stream starts without Python (cpu.c includes this file).

   A stream has two ways to start one. As a host function: `call` runs on a thread of CUDA, which must be woken first.
   Or by mail: the stream writes the address of a Call into a mailbox and waits until that is empty again. The postman,
   a thread that keeps looking into the mailboxes, finds it there a microsecond later.

   While the GPU works between two layers, the CPU would idle. It guesses the experts of the next call (Guess) and brings
   their weights into its caches, until the next mail comes.

   Nobody takes a return value, so after a failure the program's output is filled with NaN (all bits ones, in every
   type), and the failure is kept for `failure`. */

#include <time.h>

/* Which experts a token will have in the call after this one: those that the next router would choose for this call's
   x, from which the next one differs by one layer. Wrong guesses cost nothing that anybody waits for. A core fetches
   what it will read itself (Phase.own): from another core's cache it would come no faster than from memory. */
typedef struct {
    const void *x;            /* [H], of this call */
    const uint16_t *router;   /* bf16 [E, H], of the next call, as all that follows */
    const uint8_t *codes1, *sf1, *codes2, *sf2; /* of GEMM 1, [N, H] for each expert, and GEMM 2, [H, K] */
    float *scores;            /* [E], scratch */
    int32_t *ids;             /* [top_k], the guess */
    int64_t x_type, E, H, top_k, N, K, paired;
} Guess;

typedef struct {
    void (*call)(void *); /* from the library that contains `path` */
    const int64_t *program;
    int64_t count, path, threads;
    void *out;
    int64_t out_bytes;
    const Guess *guess; /* or NULL */
    /* how many times it has run; whether nothing will run it again; whether `guess` is being read */
    _Atomic int64_t done, released, guessing;
} Call;
typedef _Atomic(Call *) Mailbox; /* NULL: empty */

static _Atomic int64_t failed_call;

void call(void *argument) {
    Call *c = argument;
    int64_t failed = run(c->program, c->count, c->path, c->threads, NULL);
    if (failed) {
        memset(c->out, 0xff, (size_t)c->out_bytes);
        atomic_store(&failed_call, failed);
    }
    atomic_fetch_add(&c->done, 1);
}

void release(void *argument) { atomic_store(&((Call *)argument)->released, 1); } /* when its CUDA graph is gone */

/* What `run` returned for the last call that failed since this was asked before, or 0. */
int64_t failure(void) { return atomic_exchange(&failed_call, 0); }

enum { MAILBOXES = 256 };
static struct {
    pthread_mutex_t lock;
    Mailbox *boxes[MAILBOXES];
    atomic_long count;
    atomic_int at_work, closing;
} post = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int mail(void) {
    for (long i = 0, n = atomic_load(&post.count); i < n; i++) if (atomic_load(post.boxes[i])) return 1;
    return 0;
}

enum { SCORED = 8, LOOK = 4 << 10 }; /* rows of an item; bytes between two looks for mail */
static void score(const void *problem, int64_t item, int64_t next, int thread) {
    (void)next, (void)thread;
    const Guess *g = problem;
    for (int64_t e = item * SCORED; e < MIN((item + 1) * SCORED, g->E); e++) {
        float x[256], w[256], sum = 0;
        for (int64_t h = 0, n; h < g->H && !(h == 0 && mail()); h += n) {
            n = MIN(256, g->H - h);
            load_all(g->x, (int)g->x_type, h, x, n), load_all(g->router, BF16, e * g->H + h, w, n);
            sum += dot(x, w, n, 16);
        }
        g->scores[e] = sum;
    }
}

static void choose(const void *problem, int64_t item, int64_t next, int thread) {
    (void)item, (void)next, (void)thread;
    const Guess *g = problem;
    for (int64_t k = 0; k < g->top_k; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < g->E; e++) if (!(g->scores[e] <= g->scores[best])) best = e;
        g->ids[k] = (int32_t)best, g->scores[best] = -__builtin_inff();
    }
}

static void fetch_bytes(const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes && !(i % LOOK == 0 && mail()); i += 64) __builtin_prefetch(from + i);
}

static void fetch_item(const void *problem, int64_t item, int64_t next, int thread) {
    (void)next, (void)thread;
    const Gemm *g = problem;
    int64_t n = MIN(g->tile, g->width - first_row(g, item));
    for (int half = 0; half <= g->paired; half++) {
        Row row = item_at(g, item, half);
        fetch_bytes(row.codes, n * g->K / 2), fetch_bytes(row.sf, n * g->K / 16);
    }
}

static void guess(const Guess *g, int64_t threads) {
    int64_t width = g->paired ? g->N / 2 : g->N, experts = g->top_k;
    Gemm gemms[2] = {
        {.codes = g->codes1, .sf = g->sf1, .E = g->E, .N = g->N, .K = g->H, .width = width, .paired = g->paired, .split = width},
        {.codes = g->codes2, .sf = g->sf2, .E = g->E, .N = g->H, .K = g->K, .width = g->H},
    };
    Share own[2][MAX_THREADS];
    Job job;
    threads = MIN(threads, MAX_THREADS);
    job.count = 0, job.threads = 1;
    atomic_init(&job.joined, 0);
    add_phase(&job, score, g, (g->E + SCORED - 1) / SCORED, g->E * g->H, threads);
    add_phase(&job, choose, g, 1, 1, threads);
    for (int i = 0; i < 2; i++) {
        gemms[i].hit = g->ids, gemms[i].by_tile = experts;
        make_tiles(&gemms[i]);
        int64_t numbers = experts * gemms[i].N * gemms[i].K;
        give_shares(add_phase(&job, fetch_item, &gemms[i], experts * gemms[i].tiles, numbers, threads), own[i]);
    }
    run_job(&job, threads, NULL);
}

/* The postman. When idle, it first looks without a pause, for about as long as the pool does, then every 20 us and,
   after about half a second, every 1 ms, which costs next to nothing. */
static void *deliver(void *unused) {
    (void)unused;
    for (int64_t idle = 0; !atomic_load(&post.closing); idle++) {
        for (long i = 0, n = atomic_load(&post.count); i < n; i++) {
            Call *c = atomic_load(post.boxes[i]);
            if (!c) continue;
            c->call(c);
            int guesses = c->guess && c->call == call; /* the threads are those of the library that has computed */
            atomic_store(&c->guessing, guesses);       /* from the next line on, c may be released */
            atomic_store(post.boxes[i], NULL);
            if (guesses) guess(c->guess, c->threads), atomic_store(&c->guessing, 0);
            idle = 0;
        }
        if (idle < LOOKS) relax();
        else nanosleep(&(struct timespec){0, idle < LOOKS + 5000 ? 20000 : 1000000}, NULL);
    }
    atomic_store(&post.at_work, 0);
    return NULL;
}

/* Makes the postman look into `box`, which must be empty and stay where it is forever. Returns 0, or -1 if there is no
   room for another one or no thread. */
int64_t open_mailbox(Mailbox *box) {
    pthread_t postman;
    pthread_mutex_lock(&post.lock);
    int64_t n = atomic_load(&post.count), failed = n == MAILBOXES ? -1 : 0;
    if (!failed && !atomic_load(&post.at_work)) {
        failed = pthread_create(&postman, NULL, deliver, NULL) ? -1 : 0;
        if (!failed) pthread_detach(postman), atomic_store(&post.at_work, 1);
    }
    if (!failed) {
        post.boxes[n] = box;
        atomic_store(&post.count, n + 1);
    }
    pthread_mutex_unlock(&post.lock);
    return failed;
}

/* Waits until the postman has ended, so that the mailboxes' memory can be freed: for the end of the process. */
void close_mailboxes(void) {
    atomic_store(&post.closing, 1);
    while (atomic_load(&post.at_work)) nanosleep(&(struct timespec){0, 100000}, NULL);
}
