/* Programs that a CUDA stream starts without Python (cpu.c includes this file).

   A stream has two ways to start one. As a host function: `call` runs on a thread of CUDA, which must be woken first.
   Or by mail: the stream writes the address of a Call into a mailbox and waits until that is empty again. The postman,
   a thread that keeps looking into the mailboxes, finds it there a microsecond later.

   Nobody takes a return value, so after a failure the program's output is filled with NaN (all bits ones, in every
   type), and the failure is kept for `failure`. */

#include <time.h>

typedef struct {
    void (*call)(void *); /* from the library that contains `path` */
    const int64_t *program;
    int64_t count, path, threads;
    void *out;
    int64_t out_bytes;
    _Atomic int64_t done, released; /* how many times it has run; whether nothing will run it again */
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

/* The postman. When idle, it first looks without a pause, for about as long as the pool does, then every 20 us and,
   after about half a second, every 1 ms, which costs next to nothing. */
static void *deliver(void *unused) {
    (void)unused;
    for (int64_t idle = 0; !atomic_load(&post.closing); idle++) {
        for (long i = 0, n = atomic_load(&post.count); i < n; i++) {
            Call *c = atomic_load(post.boxes[i]);
            if (!c) continue;
            c->call(c);
            atomic_store(post.boxes[i], NULL);
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
