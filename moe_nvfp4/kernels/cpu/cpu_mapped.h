/* Weights that stay in their files (cpu.c includes this file): the loops read the page cache.

   Before a GEMM, the system is asked for everything that the router chose and that is not in memory, so that the disk
   has many reads to do at once. Then each item waits for its own rows. On Linux 5.14 and newer this wait reports an
   error if the file has become too short or cannot be read; a plain load from such memory would end in a SIGBUS.
   Pages in memory need no such calls: mincore, which tells which they are, takes a tenth of the calls' time. */

#include <errno.h>
#include <sys/mman.h>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22 /* the headers may be older than the running kernel */
#endif

enum { ASKED = 128 << 10 }; /* bytes: if asked for more in one call, the system may ignore the rest */

INLINE int advise(const uint8_t *from, int64_t bytes, int advice) {
    uintptr_t in_page = (uintptr_t)from & 4095;
    return madvise((void *)((uintptr_t)from - in_page), (size_t)bytes + in_page, advice);
}

static int in_memory(const uint8_t *from, int64_t bytes) {
    unsigned char pages[256];
    uintptr_t at = (uintptr_t)from & ~(uintptr_t)4095, end = (uintptr_t)from + (uintptr_t)bytes;
    for (; at < end; at += sizeof pages << 12) {
        int64_t n = MIN((int64_t)(end - at + 4095) >> 12, (int64_t)sizeof pages);
        if (mincore((void *)at, (size_t)n << 12, (void *)pages)) return 0;
        for (int64_t i = 0; i < n; i++) if (!(pages[i] & 1)) return 0;
    }
    return 1;
}

/* Asks the system for item i: the codes or block scales of one part of an expert's rows. Checks its address. */
static void ask_for(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const Gemm *g = problem;
    int64_t of_expert = 2 * g->parts, bytes = g->N / g->parts * g->K / (i % 2 ? 16 : 2);
    const uint64_t *entry = (const uint64_t *)(const void *)g->codes + g->hit[i / of_expert] * of_expert + i % of_expert;
    if (edited(entry, 0)) {
        atomic_store(g->lost, 2);
        return;
    }
    const uint8_t *at = address(entry, 0);
    g->there[i] = g->known && in_memory(at, bytes);
    if (g->there[i]) return;
    for (int64_t done = 0; done < bytes; done += ASKED) advise(at + done, MIN(ASKED, bytes - done), MADV_WILLNEED);
}

/* Waits until these bytes are in memory; returns 0 if the file does not have them any more. */
static int populate(const uint8_t *from, int64_t bytes) {
#ifdef MADV_POPULATE_READ
    if (advise(from, bytes, MADV_POPULATE_READ))
        return errno != EFAULT && errno != EHWPOISON; /* other errors: this system does not have the call */
#endif
    return 1;
}

/* Waits for rows first to end of expert e, all in one part; returns 0 if they are lost. */
static int bring(const Gemm *g, int64_t e, int64_t first, int64_t end) {
    if (first >= end) return 1;
    Row row = row_at(g, e, first);
    int64_t n = (end - first) * g->K;
    return populate(row.codes, n / 2) && populate(row.sf, n / 16);
}

/* Waits for the weights of a GEMM's item; returns whether they can be read. */
static int brought(const Gemm *g, int64_t item) {
    int64_t e = g->hit[hit_of(g, item)], n0 = first_row(g, item), n = MIN(g->tile, g->width - n0);
    int64_t middle = g->parts == 2 ? g->N / 2 : g->N, there = 1, missing = 0;
    if (atomic_load(g->lost)) return 0;
    for (int64_t i = 0; i < 2 * g->parts; i++) missing |= !g->there[hit_of(g, item) * 2 * g->parts + i];
    if (!missing) return 1;
    for (int half = 0; there && half <= g->paired; half++, n0 += g->split)
        there = bring(g, e, n0, MIN(n0 + n, middle)) && bring(g, e, n0 > middle ? n0 : middle, n0 + n);
    if (!there) atomic_store(g->lost, 1);
    return (int)there;
}

/* ---- copying matrices out of their files ---- */

enum { GATHERED = 256 << 10 }; /* bytes per item */
typedef struct { const uint64_t *from; uint8_t *to; int64_t bytes, parts; _Atomic int64_t *lost; } Gather;

static void gather_part(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const Gather *g = problem;
    int64_t matrix = i / g->parts, start = i % g->parts * GATHERED, n = MIN(GATHERED, g->bytes - start);
    const uint8_t *from = address(g->from, 2 * matrix) + start;
    if (atomic_load(g->lost)) return;
    if (edited(g->from, 2 * matrix)) atomic_store(g->lost, 2);
    else if (populate(from, n)) memcpy(g->to + matrix * g->bytes + start, from, (size_t)n);
    else atomic_store(g->lost, 1);
}

/* Copies `count` matrices of `bytes` bytes each, at from[0], from[2], from[4], ..., one after the other to `to`.
   Returns 0; -4 if one is not in its file any more, -5 if its address was edited. */
int64_t gather(const uint64_t *from, int64_t count, int64_t bytes, uint8_t *to, int64_t threads, Parallel *parallel) {
    _Atomic int64_t lost = 0;
    Gather g = {from, to, bytes, (bytes + GATHERED - 1) / GATHERED, &lost};
    Job job;
    job.count = 0, job.threads = 1;
    atomic_init(&job.joined, 0);
    add_phase(&job, gather_part, &g, count * g.parts, count * bytes, threads);
    run_job(&job, MIN(threads, MAX_THREADS), parallel);
    return lost ? -3 - lost : 0;
}
