/* The operations of a decoder layer on a CPU: linear layers over packed weights and attention over the KV cache.
 *
 * One rule makes speculative decoding exact here: *a row's result never depends on the other rows of the pass*. Every
 * output element is one accumulator that runs over k (or over the cache slots) in ascending order with fused
 * multiply-adds, whatever the number of rows, the tile it falls into or the thread that computes it. So a pass over one
 * token and a pass over seven give the same bits for the same position, and no shape has to be avoided.
 *
 * The cost of a pass is one read of the weights: a tile keeps up to TILE_ROWS rows in registers while they stream by.
 * Formats (native.py packs them): float layers in strips of 32 channels, [n/32][k][32]; in bf16 a 32-bit lane holds
 * channel j in its low and channel j + 16 in its high half. Integer layers in strips of 16 channels and groups of k:
 * [n/16][k/group] blocks of 64-byte lines, a line holding for each channel 4 bytes of k (int8), or 8 nibbles, k..k+3 in the
 * low ones and k+4..k+7 in the high ones (int4); the last line of a block holds a bf16 scale (low half) and minimum (high
 * half) per channel, w = scale * q + minimum. Activations are fp32; integer layers quantise them to int8 per row and group.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));

#if defined(__AVX512F__)
enum { TILE_ROWS = 12, INT_ROWS = 5, INT_STRIPS = 2 };   /* 32 registers of 16 floats */
/* Strips that a tile of so many rows takes at once; of an integer layer at least INT_STRIPS. */
#define STRIPS_OF(rows) ((rows) <= 2 ? 4 : (rows) <= 4 ? 2 : 1)
#else
enum { TILE_ROWS = 3, INT_ROWS = 2, INT_STRIPS = 1 };    /* a vector takes two to four registers */
#define STRIPS_OF(rows) 1
#endif
enum { BF16, FP32, INT8, INT4 };                     /* Linear.kind */
enum { PLAIN, RMS_NORM, SWIGLU };                    /* what happens to the input on its way into a linear layer */
enum { K_BLOCK = 2048, INT_BLOCK = 1024, QUERY_TILE = 48, SLOTS = 16, MAX_THREADS = 64, SPIN = 20000, UNIT = 4,
       CHUNK = 256,     /* of k: a piece of a bf16 strip is four pages, and its inputs stay in the L1 cache */
       AHEAD = 3        /* blocks that an integer layer fetches ahead */ };

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- threads: workers spin briefly between operations (a pass is a chain of short ones), then sleep ---- */

typedef void (*Task)(const void *job, int unit, int worker);
static struct {
    pthread_mutex_t caller, sleep;
    pthread_cond_t wake;
    _Atomic int epoch, next, running, sleepers;
    int started, threads, count, first_epoch[MAX_THREADS];
    Task task;
    const void *job;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .started = 1, .threads = 1};

static void take_units(int worker) {
    for (int unit; (unit = atomic_fetch_add(&pool.next, 1)) < pool.count;) pool.task(pool.job, unit, worker);
}

static void *worker_loop(void *argument) {
    int worker = (int)(intptr_t)argument;
    for (int seen = pool.first_epoch[worker];; seen++) {
        for (int spin = 0; spin < SPIN && atomic_load(&pool.epoch) == seen; spin++) PAUSE();
        if (atomic_load(&pool.epoch) == seen) {
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.epoch) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        if (worker < pool.threads) take_units(worker);
        atomic_fetch_sub(&pool.running, 1);
    }
    return NULL;
}

/* PyTorch's own OpenMP threads where they can be borrowed: two pools would spin against each other between operations. */
static void (*openmp_parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
void use_openmp(void *gomp_parallel) { openmp_parallel = gomp_parallel; }
static void openmp_worker(void *unused) { take_units(atomic_fetch_add(&pool.running, 1)); }

static void parallel(Task task, const void *job, int count) {
    if (count == 1 || pool.threads == 1) {
        for (int unit = 0; unit < count; unit++) task(job, unit, 0);
        return;
    }
    pool.task = task, pool.job = job, pool.count = count;
    atomic_store(&pool.next, 0);
    if (openmp_parallel) {
        atomic_store(&pool.running, 0);   /* here it numbers the workers */
        openmp_parallel(openmp_worker, NULL, pool.threads, 0);
        return;
    }
    atomic_store(&pool.running, pool.started - 1);
    atomic_fetch_add(&pool.epoch, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_units(0);
    for (int spin = 0; atomic_load(&pool.running); spin++) {
        if (spin < SPIN) PAUSE(); else sched_yield();
    }
}

/* Set the number of threads of all later operations; returns 0, or -1 when the system refuses. */
int set_threads(int threads) {
    pthread_mutex_lock(&pool.caller);
    int failed = threads < 1 || threads > MAX_THREADS;
    while (!failed && !openmp_parallel && pool.started < threads) {
        pthread_t thread;
        pool.first_epoch[pool.started] = atomic_load(&pool.epoch);
        failed = pthread_create(&thread, NULL, worker_loop, (void *)(intptr_t)pool.started);
        if (!failed) pthread_detach(thread), pool.started++;
    }
    if (!failed) pool.threads = threads;
    pthread_mutex_unlock(&pool.caller);
    return failed ? -1 : 0;
}

/* Working memory that only grows and belongs to the holder of pool.caller; NULL when there is none left. */
static void *workspace(size_t bytes) {
    static void *memory;
    static size_t size;
    if (size < bytes) {
        free(memory);
        memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
        size = memory ? bytes : 0;
    }
    return memory;
}

/* ---- small numeric pieces ---- */

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }
INLINE f32x16 load_bf16(const uint16_t *p) {
    return (f32x16)(__builtin_convertvector(*(const u16x16 *)p, u32x16) << 16);
}
INLINE f32x16 load_some(const float *p, int lanes) {   /* a copy of unknown size is a call: keep it off the usual path */
    if (lanes >= 16) return *(const f32x16 *)p;
    f32x16 v = {0};
    memcpy(&v, p, lanes * 4);
    return v;
}
INLINE void store_some(float *p, f32x16 v, int lanes) {
    if (lanes >= 16) *(f32x16 *)p = v;
    else memcpy(p, &v, lanes * 4);
}
INLINE f32x16 load_kv(int kind, const void *base, int64_t i) {
    return kind == BF16 ? load_bf16((const uint16_t *)base + i) : *(const f32x16 *)((const float *)base + i);
}
INLINE uint16_t to_bf16(float x) {   /* round to nearest even; a NaN stays one */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE float sum16(f32x16 v) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}
/* e^x by 2^n * polynomial (Cephes), within 2 units in the last place; 0 below -87, so hidden slots vanish exactly. */
INLINE f32x16 exp16(f32x16 x) {
    i32x16 zero = x < splat(-87.0f), large = x > splat(88.0f);   /* e^88 is near the largest number there is */
    f32x16 clipped = (f32x16)(((i32x16)x & ~zero & ~large) | ((i32x16)splat(88.0f) & large));
    f32x16 shifted = clipped * 1.44269504f + 12582912.0f;     /* 1.5 * 2^23 rounds to an integer */
    i32x16 n = (i32x16)shifted - (i32x16)splat(12582912.0f);
    f32x16 whole = shifted - 12582912.0f, r = clipped - whole * 0.693359375f + whole * 2.12194440e-4f;
    f32x16 poly = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
                   + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    f32x16 value = poly * r * r + r + 1.0f;
    return (f32x16)(((i32x16)value + (n << 23)) & ~zero);
}
INLINE float rms_scale(const float *x, int n, float eps) {
    f32x16 squares = {0};
    for (int i = 0; i + 16 <= n; i += 16) { f32x16 v = *(const f32x16 *)(x + i); squares += v * v; }
    float total = sum16(squares);
    for (int i = n / 16 * 16; i < n; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / n + eps);
}

/* ---- linear layers ---- */

typedef struct {
    int32_t kind, n, k, group;
    const void *weights;
    const float *bias;                   /* (n,) or NULL */
} Linear;

typedef struct {
    const Linear *layer;
    const float *x, *norm, *residual;    /* x: (rows, k), or (rows, 2k) before SWIGLU; residual: (rows, n) or NULL */
    float *out;                          /* (rows, n) */
    int rows, tile, tiles, prologue;     /* tiles of `tile` rows, the last of the rest */
    float eps;
    float *packed;                       /* float layers: per row tile [k][rows of the tile] */
    f32x16 *sums;                        /* and per worker [strips of a unit][rows][2] */
    int8_t *quantised;                   /* integer layers: (rows, k), with a scale and a scaled sum per group */
    float *x_scales, *x_sums;            /* (rows, k/group) */
    int unit;                            /* strips; many where there are many, as the first lines of a unit come late */
} LinearJob;

/* Input elements begin..end of one row after the prologue, into `to` with the given stride. */
INLINE void load_input(const LinearJob *job, int row, int begin, int end, float *to, int stride) {
    int k = job->layer->k;
    const float *x = job->x + (int64_t)row * (job->prologue == SWIGLU ? 2 * k : k);
    float scale = job->prologue == RMS_NORM ? rms_scale(x, k, job->eps) : 1.0f;
    for (int i = begin; i < end; i += 16) {
        int lanes = MIN(16, end - i);
        f32x16 v = load_some(x + i, lanes);
        if (job->prologue == RMS_NORM) v = v * scale * load_some(job->norm + i, lanes);
        if (job->prologue == SWIGLU) v = v / (1.0f + exp16(-v)) * load_some(x + k + i, lanes);
        if (stride == 1) store_some(to + i - begin, v, lanes);
        else for (int lane = 0; lane < lanes; lane++) to[(int64_t)(i - begin + lane) * stride] = v[lane];
    }
}

static void pack_rows(const void *argument, int unit, int worker) {   /* unit: a row tile x a block of k */
    const LinearJob *job = argument;
    int k = job->layer->k, blocks = (k + K_BLOCK - 1) / K_BLOCK, first = unit / blocks * job->tile;
    int rows = MIN(job->tile, job->rows - first), begin = unit % blocks * K_BLOCK, end = MIN(k, begin + K_BLOCK);
    for (int row = 0; row < rows; row++)
        load_input(job, first + row, begin, end, job->packed + (int64_t)first * k + (int64_t)begin * rows + row, rows);
}

INLINE void store_sum(const LinearJob *job, int row, int channel, f32x16 value) {
    int n = job->layer->n, lanes = MIN(16, n - channel);
    int64_t at = (int64_t)row * n + channel;
    if (lanes <= 0) return;
    if (job->layer->bias) value += load_some(job->layer->bias + channel, lanes);
    if (job->residual) value += load_some(job->residual + at, lanes);
    store_some(job->out + at, value, lanes);
}

/* sum += the R inputs at x times one k of S strips of 32 channels. */
INLINE void float_step(int kind, const int R, const int S, const char *weights, int64_t strip_bytes, const float *x,
                       f32x16 sum[R][2 * S]) {
    f32x16 w[2 * S];
    UNROLL for (int s = 0; s < S; s++, weights += strip_bytes) {
        if (kind == BF16) {
            u32x16 pair = *(const u32x16 *)weights;
            w[2 * s] = (f32x16)(pair << 16), w[2 * s + 1] = (f32x16)(pair & 0xffff0000u);
        } else w[2 * s] = *(const f32x16 *)weights, w[2 * s + 1] = *(const f32x16 *)(weights + 64);
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2 * S; c++) sum[r][c] += x[r] * w[c];
}

/* R rows times S strips over one piece of k, on top of the `sums` of the pieces before: R * 2S sums, 2S weights and an input
 * stay within 29 registers. Meanwhile it fetches its share of the next piece, from all its pages at once: the hardware runs
 * only some 20 lines ahead in a page, too few to keep the memory busy. */
INLINE void float_tile(const LinearJob *job, int kind, const int R, const int S, int tile, int strip, int begin,
                       const char *next, f32x16 *sums) {
    const int LINE = kind == BF16 ? 64 : 128, PAGES = CHUNK * LINE / 4096, STEPS = CHUNK / 64;
    int k = job->layer->k, count = MIN(CHUNK, k - begin);
    unsigned share = 65536 / job->tiles, fetched = tile * 64 * share;   /* lines of each page, times 65536 */
    int64_t strip_bytes = (int64_t)k * LINE;
    const char *weights = (const char *)job->layer->weights + strip * strip_bytes + (int64_t)begin * LINE;
    const float *x = job->packed + (int64_t)tile * job->tile * k + (int64_t)begin * R;
    f32x16 sum[R][2 * S];
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2; c++)
        sum[r][2 * s + c] = begin ? sums[(s * job->rows + r) * 2 + c] : (f32x16){0};
    for (; count >= STEPS; count -= STEPS, fetched += share) {
        const char *line = next + (fetched >> 16) * 64;
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int page = 0; page < PAGES; page++)
            __builtin_prefetch(line + s * strip_bytes + page * 4096);
        UNROLL for (int i = 0; i < STEPS; i++, weights += LINE, x += R) float_step(kind, R, S, weights, strip_bytes, x, sum);
    }
    for (; count > 0; count--, weights += LINE, x += R) float_step(kind, R, S, weights, strip_bytes, x, sum);
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2; c++)
        sums[(s * job->rows + r) * 2 + c] = sum[r][2 * s + c];
}

_Static_assert(STRIPS_OF((TILE_ROWS + 2) / 2) == 1, "where there are several tiles, of any height, they take a strip at a time");

INLINE void float_piece(const LinearJob *job, int kind, int tile, int strip, int strips, int begin, const char *next,
                        f32x16 *sums) {
    switch (MIN(job->tile, job->rows - tile * job->tile)) {
#define TILE(R, S) float_tile(job, kind, R, S, tile, strip, begin, next, sums)
#define CASE(R) case R: \
        if (R <= TILE_ROWS) { if (strips == 1) TILE(R, 1); else TILE(R, STRIPS_OF(R)); } \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
#undef TILE
    }
}

static void float_strips(const void *argument, int unit, int worker) {   /* unit: UNIT strips, for all rows */
    const LinearJob *job = argument;
    const Linear *layer = job->layer;
    int first = unit * UNIT, last = MIN((layer->n + 31) / 32, first + UNIT), line = layer->kind == BF16 ? 64 : 128;
    f32x16 *sums = job->sums + (size_t)worker * UNIT * job->rows * 2;
    for (int begin = 0; begin < layer->k; begin += CHUNK)
        for (int strip = first, strips; strip < last; strip += strips) {
            strips = strip + STRIPS_OF(job->tile) <= last ? STRIPS_OF(job->tile) : 1;
            int last_piece = strip + strips >= last, last_chunk = begin + CHUNK >= layer->k;
            int64_t next = last_piece ? (int64_t)(last_chunk ? last : first) * layer->k + (last_chunk ? 0 : begin + CHUNK)
                                      : (int64_t)(strip + strips) * layer->k + begin;
            for (int tile = 0; tile < job->tiles; tile++) {
                f32x16 *to = sums + ((size_t)(strip - first) * job->rows + tile * job->tile) * 2;
                const char *ahead = (const char *)layer->weights + next * line;
                if (layer->kind == BF16) float_piece(job, BF16, tile, strip, strips, begin, ahead, to);
                else float_piece(job, FP32, tile, strip, strips, begin, ahead, to);
            }
        }
    for (int strip = first; strip < last; strip++)
        for (int row = 0; row < job->rows; row++, sums += 2)
            for (int c = 0; c < 2; c++) store_sum(job, row, strip * 32 + c * 16, sums[c]);
}

/* One group to int8: q = x * 127 / peak, rounded to nearest even by adding 1.5 * 2^23. Returns the sum of q. The scale of a
 * group with a NaN or an infinity is NaN. */
INLINE int quantise_group(const float *x, int group, int8_t *q, float *scale) {
    f32x16 peaks = {0}, poison = {0};
    float peak = 0;
    for (int i = 0; i < group; i += 16) {
        f32x16 v = load_some(x + i, group - i);
        poison += v * 0.0f;
        v = (f32x16)((i32x16)v & 0x7fffffff);
        i32x16 larger = v > peaks;
        peaks = (f32x16)(((i32x16)v & larger) | ((i32x16)peaks & ~larger));
    }
    for (int lane = 0; lane < 16; lane++) peak = MAX(peak, peaks[lane]);
    float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    i32x16 sums = {0};
    for (int i = 0; i < group; i += 16) {
        i32x16 whole = (i32x16)(load_some(x + i, group - i) * inverse + 12582912.0f) - (i32x16)splat(12582912.0f);
        i8x16 narrow = __builtin_convertvector(whole, i8x16);
        if (group - i >= 16) *(i8x16 *)(q + i) = narrow; else memcpy(q + i, &narrow, group - i);
        sums += whole;
    }
    *scale = peak / 127.0f + sum16(poison);
    int total = 0;
    for (int lane = 0; lane < 16; lane++) total += sums[lane];
    return total;
}

static void quantise_rows(const void *argument, int unit, int worker) {   /* unit: a row x a block of k */
    const LinearJob *job = argument;
    int k = job->layer->k, group = job->layer->group, blocks = (k + INT_BLOCK - 1) / INT_BLOCK;
    int row = unit / blocks, begin = unit % blocks * INT_BLOCK, end = MIN(k, begin + INT_BLOCK);
    float values[INT_BLOCK];
    load_input(job, row, begin, end, values, 1);
    for (int i = begin; i < end; i += group) {
        int64_t at = (int64_t)row * (k / group) + i / group;
        int sum = quantise_group(values + i - begin, group, job->quantised + (int64_t)row * k + i, job->x_scales + at);
        job->x_sums[at] = sum * job->x_scales[at];
    }
}

/* sum[lane] += the four unsigned bytes of weights[lane] times the four signed bytes of x. */
INLINE i32x16 dot4(i32x16 sum, u32x16 weights, int32_t x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#else
    UNROLL for (int byte = 0; byte < 4; byte++)
        sum += (i32x16)(weights >> 8 * byte & 0xffu) * (int32_t)(int8_t)(x >> 8 * byte);
    return sum;
#endif
}

/* R rows times S strips of 16 channels: integer dot products inside a group, floats across groups. */
INLINE void int_tile(const LinearJob *job, int kind, const int R, const int S, int first, int strip) {
    int k = job->layer->k, group = job->layer->group, groups = k / group, lines = group / (kind == INT4 ? 8 : 4);
    int64_t block_bytes = (lines + 1) * 64, strip_bytes = groups * block_bytes;
    const char *block = (const char *)job->layer->weights + strip * strip_bytes;
    f32x16 total[R][S];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < S; s++) total[r][s] = (f32x16){0};
    for (int g = 0; g < groups; g++, block += block_bytes) {
        i32x16 sum[R][S];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < S; s++) sum[r][s] = (i32x16){0};
        const char *ahead = block + AHEAD * block_bytes + (g + AHEAD < groups ? 0 : (S - 1) * strip_bytes);
        for (int i = 0; i < lines; i++) UNROLL for (int s = 0; s < S; s++) {
            u32x16 w = *(const u32x16 *)(block + s * strip_bytes + i * 64);
            __builtin_prefetch(ahead + s * strip_bytes + i * 64);
            UNROLL for (int r = 0; r < R; r++) {
                const int32_t *x = (const int32_t *)(job->quantised + (int64_t)(first + r) * k + g * group);
                if (kind == INT8) sum[r][s] = dot4(sum[r][s], w, x[i]);
                else {
                    sum[r][s] = dot4(sum[r][s], w & 0x0f0f0f0fu, x[2 * i]);
                    sum[r][s] = dot4(sum[r][s], w >> 4 & 0x0f0f0f0fu, x[2 * i + 1]);
                }
            }
        }
        UNROLL for (int s = 0; s < S; s++) {
            u32x16 pair = *(const u32x16 *)(block + s * strip_bytes + lines * 64);
            f32x16 scale = (f32x16)(pair << 16), minimum = (f32x16)(pair & 0xffff0000u);
            __builtin_prefetch(ahead + s * strip_bytes + lines * 64);
            UNROLL for (int r = 0; r < R; r++) {
                int64_t row = (int64_t)(first + r) * groups + g;
                f32x16 dot = __builtin_convertvector(sum[r][s], f32x16) * job->x_scales[row];
                total[r][s] += dot * scale;
                total[r][s] += job->x_sums[row] * minimum;
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < S; s++)
        store_sum(job, first + r, (strip + s) * 16, total[r][s]);
}

INLINE void int_rows(const LinearJob *job, int kind, const int R, int first, int begin, int end) {
    const int S = MAX(STRIPS_OF(R), INT_STRIPS);
    int strip = begin;
    for (; strip + S <= end; strip += S) int_tile(job, kind, R, S, first, strip);
    for (; strip < end; strip++) int_tile(job, kind, R, 1, first, strip);
}

static void int_strips(const void *argument, int unit, int worker) {   /* unit: job->unit strips, for all rows */
    const LinearJob *job = argument;
    int begin = unit * job->unit, end = MIN((job->layer->n + 15) / 16, begin + job->unit);
    for (int first = 0; first < job->rows; first += job->tile)
        switch (MIN(job->tile, job->rows - first) * 2 + (job->layer->kind == INT4)) {
#define CASE(R) case 2 * R: if (R <= INT_ROWS) int_rows(job, INT8, R, first, begin, end); break; \
                case 2 * R + 1: if (R <= INT_ROWS) int_rows(job, INT4, R, first, begin, end); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#undef CASE
        }
}

/* Spread the rows over tiles of nearly equal height: 14 rows in tiles of 12 would leave one of 2. */
static int even_tile(int rows, int limit) {
    int tiles = (rows + limit - 1) / limit;
    return (rows + tiles - 1) / tiles;
}

/* out (rows, n) = prologue(x) @ weights^T + bias + residual, which may be out itself; returns 0, or -1 without memory. */
int linear(const Linear *layer, const float *x, float *out, int rows, int prologue, const float *norm, float eps,
           const float *residual) {
    int is_int = layer->kind == INT8 || layer->kind == INT4, k = layer->k;
    LinearJob job = {.layer = layer, .x = x, .norm = norm, .residual = residual, .out = out, .rows = rows,
                     .prologue = prologue, .eps = eps, .tile = even_tile(rows, is_int ? INT_ROWS : TILE_ROWS)};
    job.tiles = (rows + job.tile - 1) / job.tile;
    pthread_mutex_lock(&pool.caller);   /* before the number of threads is read */
    size_t groups = is_int ? k / layer->group : 0, sums = (size_t)pool.threads * UNIT * rows * 32 * 4;
    char *memory = workspace(is_int ? rows * (2 * groups * 4 + (size_t)k) : sums + (size_t)rows * k * 4);
    if (memory && is_int) {
        job.x_scales = (float *)memory, job.x_sums = job.x_scales + rows * groups;
        job.quantised = (int8_t *)(job.x_sums + rows * groups);
        parallel(quantise_rows, &job, rows * ((k + INT_BLOCK - 1) / INT_BLOCK));
        int strips = (layer->n + 15) / 16;
        job.unit = MAX(UNIT, strips / (8 * pool.threads) / UNIT * UNIT);
        parallel(int_strips, &job, (strips + job.unit - 1) / job.unit);
    } else if (memory) {
        job.sums = (f32x16 *)memory, job.packed = (float *)(memory + sums);
        parallel(pack_rows, &job, job.tiles * ((k + K_BLOCK - 1) / K_BLOCK));
        parallel(float_strips, &job, ((layer->n + 31) / 32 + UNIT - 1) / UNIT);
    }
    pthread_mutex_unlock(&pool.caller);
    return memory ? 0 : -1;
}

/* ---- attention ---- */

typedef struct {
    int32_t layers, heads, kv_heads, head_dim, kv_kind, capacity, start, rows;
    float eps;
    const float *cos, *sin;            /* (positions, head_dim / 2) */
    char *keys, *values;               /* (layers, kv_heads, capacity, head_dim) */
} Shape;

typedef struct {
    const Linear *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm;      /* (head_dim,) or NULL: Qwen3 */
} Layer;

typedef struct {
    const Shape *shape;
    const Layer *layer;
    float *qkv;                        /* (rows, (heads + 2 kv_heads) * head_dim), rotated in place */
    const int64_t *positions;          /* (rows,) */
    const uint8_t *visible;            /* (rows, rows): may row i see row j of the pass; NULL: a chain */
    void *keys, *values;               /* of the layer: (kv_heads, capacity, head_dim) */
    float *out;                        /* (rows, heads * head_dim) */
    char *memory;
    size_t memory_per_worker;
    int query_tiles;
} AttentionJob;

static void rotate_row(const void *argument, int row, int worker) {   /* norm and rotate q and k, store k and v */
    const AttentionJob *job = argument;
    const Shape *shape = job->shape;
    int dim = shape->head_dim, half = dim / 2, slot = shape->start + row;
    const float *cos = shape->cos + job->positions[row] * half, *sin = shape->sin + job->positions[row] * half;
    float *x = job->qkv + (int64_t)row * (shape->heads + 2 * shape->kv_heads) * dim;
    for (int head = 0; head < shape->heads + 2 * shape->kv_heads; head++, x += dim) {
        int is_query = head < shape->heads, kv = head - shape->heads, is_value = kv >= shape->kv_heads;
        const float *norm = is_query ? job->layer->q_norm : job->layer->k_norm;
        if (!is_value && norm) {
            float scale = rms_scale(x, dim, shape->eps);
            for (int i = 0; i < dim; i++) x[i] *= scale * norm[i];
        }
        for (int i = 0; !is_value && i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i], x[i + half] = b * cos[i] + a * sin[i];
        }
        float factor = 1.0f / sqrtf(dim);
        for (int i = 0; is_query && i < dim; i++) x[i] *= factor;
        if (is_query) continue;
        int64_t at = ((int64_t)(kv % shape->kv_heads) * shape->capacity + slot) * dim;
        void *to = is_value ? job->values : job->keys;
        for (int i = 0; i < dim; i++) {
            if (shape->kv_kind == BF16) ((uint16_t *)to)[at + i] = to_bf16(x[i]); else ((float *)to)[at + i] = x[i];
        }
    }
}

/* scores[r][slot..slot+15] = q[r] . keys, for R rows; `block` is the transposed (head_dim, 16) block of keys. */
INLINE void score_rows(const int R, const float *const *q, const float *block, int dim, float *scores, int64_t stride) {
    f32x16 sum[R];
    UNROLL for (int r = 0; r < R; r++) sum[r] = (f32x16){0};
    for (int i = 0; i < dim; i++) {
        f32x16 key = *(const f32x16 *)(block + i * SLOTS);
        UNROLL for (int r = 0; r < R; r++) sum[r] += q[r][i] * key;
    }
    UNROLL for (int r = 0; r < R; r++) *(f32x16 *)(scores + r * stride) = sum[r];
}

/* out[r][0..15*C] = sum over slots of weights[r][slot] * values[slot], for R rows and C vectors of 16. */
INLINE void mix_rows(int kind, const int R, const int C, const float *weights, int64_t stride, const void *values,
                     int64_t at, int dim, int slots, float *const *out, const float *scale) {
    f32x16 sum[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = (f32x16){0};
    for (int slot = 0; slot < slots; slot++, at += dim) {
        f32x16 value[C];
        UNROLL for (int c = 0; c < C; c++) value[c] = load_kv(kind, values, at + c * 16);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
            sum[r][c] += weights[r * stride + slot] * value[c];
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
        *(f32x16 *)(out[r] + c * 16) = sum[r][c] * scale[r];
}

INLINE void hide(const AttentionJob *job, int row, int slot, float *scores) {   /* 16 scores of one row */
    int start = job->shape->start;
    for (int lane = 0; lane < SLOTS; lane++) {
        int other = slot + lane - start;
        int seen = other < 0 || (other < job->shape->rows && (job->visible ? job->visible[row * job->shape->rows + other]
                                                                           : other <= row));
        if (!seen) scores[lane] = -INFINITY;
    }
}

INLINE float softmax_row(float *scores, int slots) {   /* in place, without the division; returns 1 / sum */
    f32x16 peaks = splat(-INFINITY), sums = {0};
    float peak = -INFINITY;
    for (int slot = 0; slot < slots; slot += SLOTS) {
        f32x16 v = *(f32x16 *)(scores + slot);
        i32x16 larger = v > peaks;
        peaks = (f32x16)(((i32x16)v & larger) | ((i32x16)peaks & ~larger));
    }
    for (int lane = 0; lane < 16; lane++) peak = MAX(peak, peaks[lane]);
    for (int slot = 0; slot < slots; slot += SLOTS) {
        f32x16 v = exp16(*(f32x16 *)(scores + slot) - peak);
        *(f32x16 *)(scores + slot) = v;
        sums += v;
    }
    return 1.0f / sum16(sums);
}

INLINE void attend_tile(const AttentionJob *job, int kind, int unit, int worker) {
    const Shape *shape = job->shape;
    int dim = shape->head_dim, group = shape->heads / shape->kv_heads, kv = unit / job->query_tiles;
    int first = unit % job->query_tiles * QUERY_TILE, count = MIN(QUERY_TILE, shape->rows * group - first);
    int last_row = (first + count - 1) / group, slots = shape->start + (job->visible ? shape->rows : last_row + 1);
    int padded = (slots + SLOTS - 1) / SLOTS * SLOTS;
    int64_t base = (int64_t)kv * shape->capacity * dim, width = (int64_t)(shape->heads + 2 * shape->kv_heads) * dim;
    float *block = (float *)(job->memory + worker * job->memory_per_worker), *scores = block + SLOTS * dim;
    const float *q[QUERY_TILE];
    float *out[QUERY_TILE], scale[QUERY_TILE];
    for (int i = 0; i < count; i++) {   /* query heads of the same KV head are neighbours, row by row */
        int row = (first + i) / group, head = kv * group + (first + i) % group;
        q[i] = job->qkv + row * width + head * dim;
        out[i] = job->out + ((int64_t)row * shape->heads + head) * dim;
    }
    for (int slot = 0; slot < padded; slot += SLOTS) {
        for (int s = 0; s < SLOTS; s++) for (int i = 0; i < dim; i += 16) {
            f32x16 key = slot + s < slots ? load_kv(kind, job->keys, base + (int64_t)(slot + s) * dim + i) : (f32x16){0};
            for (int lane = 0; lane < 16; lane++) block[(i + lane) * SLOTS + s] = key[lane];
        }
        for (int i = 0; i < count;) {
            float *to = scores + (int64_t)i * padded + slot;
            if (count - i >= 8) score_rows(8, q + i, block, dim, to, padded), i += 8;
            else if (count - i >= 4) score_rows(4, q + i, block, dim, to, padded), i += 4;
            else score_rows(1, q + i, block, dim, to, padded), i += 1;
        }
        if (slot + SLOTS > shape->start)
            for (int i = 0; i < count; i++) hide(job, (first + i) / group, slot, scores + (int64_t)i * padded + slot);
    }
    for (int i = 0; i < count; i++) scale[i] = softmax_row(scores + (int64_t)i * padded, padded);
    for (int d = 0; d < dim; d += 32) {
        float *to[QUERY_TILE];
        for (int i = 0; i < count; i++) to[i] = out[i] + d;
        for (int i = 0; i < count;) {
            const float *weights = scores + (int64_t)i * padded;
            int one = dim - d < 32;
#define MIX(R, C) mix_rows(kind, R, C, weights, padded, job->values, base + d, dim, slots, to + i, scale + i)
            if (count - i >= 6) { if (one) MIX(6, 1); else MIX(6, 2); i += 6; }
            else { if (one) MIX(1, 1); else MIX(1, 2); i += 1; }
#undef MIX
        }
    }
}

static void attend(const void *argument, int unit, int worker) {
    const AttentionJob *job = argument;
    if (job->shape->kv_kind == BF16) attend_tile(job, BF16, unit, worker); else attend_tile(job, FP32, unit, worker);
}

/* Rotate, append to the cache and attend; returns 0, or -1 without memory. */
static int attention(const Shape *shape, const Layer *layer, int index, float *qkv, const int64_t *positions,
                     const uint8_t *visible, float *out) {
    int64_t offset = (int64_t)index * shape->kv_heads * shape->capacity * shape->head_dim * (shape->kv_kind == BF16 ? 2 : 4);
    AttentionJob job = {.shape = shape, .layer = layer, .qkv = qkv, .positions = positions, .visible = visible, .out = out,
                        .keys = shape->keys + offset, .values = shape->values + offset};
    int queries = shape->rows * (shape->heads / shape->kv_heads), padded = shape->start + shape->rows + SLOTS;
    job.query_tiles = (queries + QUERY_TILE - 1) / QUERY_TILE;
    job.memory_per_worker = ((size_t)SLOTS * shape->head_dim + (size_t)MIN(queries, QUERY_TILE) * padded) * 4 / 64 * 64 + 64;
    pthread_mutex_lock(&pool.caller);
    job.memory = workspace(job.memory_per_worker * pool.threads);
    if (job.memory) {
        parallel(rotate_row, &job, shape->rows);
        parallel(attend, &job, shape->kv_heads * job.query_tiles);
    }
    pthread_mutex_unlock(&pool.caller);
    return job.memory ? 0 : -1;
}

/* All decoder layers, in place on x (rows, hidden). scratch holds the widest results of a layer: rows * (n of qkv + heads *
 * head_dim + n of gate_up). head_dim is a multiple of 16. Returns 0, or -1 without memory. */
int decode(const Shape *shape, const Layer *layers, float *x, const int64_t *positions, const uint8_t *visible, float *scratch) {
    int rows = shape->rows, failed = 0;
    for (int index = 0; index < shape->layers && !failed; index++) {
        const Layer *layer = layers + index;
        float *qkv = scratch, *mixed = qkv + (int64_t)rows * layer->qkv->n, *gate_up = mixed + (int64_t)rows * layer->out->k;
        failed |= linear(layer->qkv, x, qkv, rows, RMS_NORM, layer->input_norm, shape->eps, NULL);
        failed |= attention(shape, layer, index, qkv, positions, visible, mixed);
        failed |= linear(layer->out, mixed, x, rows, PLAIN, NULL, 0, x);
        failed |= linear(layer->gate_up, x, gate_up, rows, RMS_NORM, layer->mlp_norm, shape->eps, NULL);
        failed |= linear(layer->down, gate_up, x, rows, SWIGLU, NULL, 0, x);
    }
    return failed;
}
