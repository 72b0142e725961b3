// What solvers do with the rows of float32 matrices, one row per sample, in one pass over memory, and with the few
// numbers that they keep of each.
//
// Rows are contiguous and `apart` numbers from each other. Their sums are taken in float64, over stretches that
// are added up in their order, so that they depend on nothing else.

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STRETCH 2048
#define INLINE static inline __attribute__((always_inline))

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

struct rows_observe {
    const float *image; size_t image_apart; const float *x; size_t x_apart; float *f; size_t f_apart; float *g;
    size_t g_apart, rows, n; double *norms; int first, last, threads;
};

// f = image and g = image - x; `norms` gets those of each row of g and of f, which lie side by side. An image may come in
// several parts, whose squares are added up from the first to the last.
// Returns -1 if there was no memory.
int64_t opteq_rows_observe(const struct rows_observe *a) {
    size_t rows = a->rows, n = a->n, stretches = (n + STRETCH - 1) / STRETCH;
    double *sums = malloc(2 * sizeof(double) * rows * stretches + 1);
    if (!sums) return -1;
#pragma omp parallel for collapse(2) schedule(static) num_threads(a->threads)
    for (size_t row = 0; row < rows; row++)
        for (size_t s = 0; s < stretches; s++) {
            size_t start = s * STRETCH, width = smaller(STRETCH, n - start);
            const float *value = a->image + row * a->image_apart + start, *from = a->x + row * a->x_apart + start;
            float *to = a->f + row * a->f_apart + start, *change = a->g + row * a->g_apart + start;
            double moved = 0, size = 0;
#pragma omp simd reduction(+ : moved, size)
            for (size_t i = 0; i < width; i++) {
                float difference = value[i] - from[i];
                to[i] = value[i];
                change[i] = difference;
                moved += (double)difference * difference;
                size += (double)value[i] * value[i];
            }
            sums[2 * (row * stretches + s)] = moved;
            sums[2 * (row * stretches + s) + 1] = size;
        }
    for (size_t i = 0; i < 2 * rows; i++) {
        double sum = a->first ? 0 : a->norms[i];
        for (size_t s = 0; s < stretches; s++) sum += sums[2 * (i / 2 * stretches + s) + i % 2];
        a->norms[i] = a->last ? sqrt(sum) : sum;
    }
    free(sums);
    return 0;
}

INLINE double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

struct rows_descend {
    float *x, *r; const float *p, *q, *mp; const double *rr; unsigned char *active; int64_t *steps;
    double *seen, *lengths; size_t rows, n; int threads;
};

// The first half of a step of conjugate gradients for every active row: x += a p and r -= a q, with q = A p,
// a = rr / <mp, q> and mp = M p. A row without curvature, <mp, q> not above 0, is no longer active. `lengths` gets
// the a of each row. `steps` counts the rows' steps, and `seen` gets the rr of those that take this one, else NaN.
int64_t opteq_rows_descend(const struct rows_descend *a) {
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (size_t row = 0; row < a->rows; row++) {
        size_t n = a->n, start = row * n;
        float *x = a->x + start, *r = a->r + start;
        const float *p = a->p + start, *q = a->q + start;
        a->lengths[row] = 0;
        a->seen[row] = NAN;
        if (!a->active[row]) continue;
        a->steps[row]++;
        a->seen[row] = a->rr[row];
        double curvature = dot(a->mp + start, q, n);
        a->active[row] = curvature > 0;
        if (!a->active[row]) continue;
        a->lengths[row] = a->rr[row] / curvature;
        float length = (float)a->lengths[row];
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            x[i] += length * p[i];
            r[i] -= length * q[i];
        }
    }
    return 0;
}

struct rows_turn {
    float *p, *mp; const float *r, *mr; double *rr, goal; unsigned char *active; double *seen; size_t rows, n;
    int threads;
};

// The second half: the new rr = <r, mr> with mr = M r, and p = r + b p, mp = mr + b mp with b its ratio to the
// old one. A row that has reached the goal is no longer active. `mp` may be `p`, if `mr` is `r`. `seen` gets the new rr
// of the rows that took the step. Returns how many are still active.
int64_t opteq_rows_turn(const struct rows_turn *a) {
    size_t going = 0;
#pragma omp parallel for schedule(static) num_threads(a->threads) reduction(+ : going)
    for (size_t row = 0; row < a->rows; row++) {
        if (!a->active[row]) continue;
        size_t n = a->n, start = row * n;
        float *p = a->p + start, *mp = a->mp + start;
        const float *r = a->r + start, *mr = a->mr + start;
        double before = a->rr[row], now = dot(r, mr, n);
        a->seen[row] = a->rr[row] = now < 0 ? 0 : now;
        a->active[row] = a->rr[row] > a->goal;
        if (!a->active[row]) continue;
        going++;
        float b = (float)(now / before);
#pragma omp simd
        for (size_t i = 0; i < n; i++) p[i] = r[i] + b * p[i];
        if (mp == p) continue;
#pragma omp simd
        for (size_t i = 0; i < n; i++) mp[i] = mr[i] + b * mp[i];
    }
    return going;
}

// Solves one system of `n` equations by elimination with row pivoting, in place: `matrix` is used up, `b` becomes
// the solution. Returns 1 where a pivot was 0 or not finite.
static int solve(double *matrix, double *b, size_t n) {
    int singular = 0;
    for (size_t k = 0; k < n; k++) {
        size_t pivot = k;
        for (size_t i = k + 1; i < n; i++)
            if (fabs(matrix[i * n + k]) > fabs(matrix[pivot * n + k])) pivot = i;
        for (size_t j = 0; j < n && pivot != k; j++) {
            double other = matrix[k * n + j];
            matrix[k * n + j] = matrix[pivot * n + j];
            matrix[pivot * n + j] = other;
        }
        double right = b[k];
        b[k] = b[pivot], b[pivot] = pivot == k ? b[k] : right;
        double head = matrix[k * n + k];
        if (!(fabs(head) > 0) || !isfinite(head)) singular = 1;
        for (size_t i = k + 1; i < n; i++) {
            double factor = matrix[i * n + k] / head;
            for (size_t j = k + 1; j < n; j++) matrix[i * n + j] -= factor * matrix[k * n + j];
            b[i] -= factor * b[k];
        }
    }
    for (size_t k = n; k-- > 0;) {
        for (size_t j = k + 1; j < n; j++) b[k] -= matrix[k * n + j] * b[j];
        b[k] /= matrix[k * n + k];
    }
    return singular;
}

// The weights of Anderson's step for one row: `a` with sum 1 that makes aᵀ(G + ridge diag G)a smallest over the
// usable iterates, where G, of `used` rows that are `apart` numbers from each other, holds the inner products of
// their changes. Where that is no regular system the newest iterate gets all the weight. `scratch` has room for a
// matrix.
static void weigh(const double *gram, size_t apart, size_t used, size_t newest, const unsigned char *usable,
                  double ridge, double *scratch, double *a) {
    for (size_t i = 0; i < used; i++) {
        for (size_t j = 0; j < used; j++)
            scratch[i * used + j] = usable[i] && usable[j] ? gram[i * apart + j] : 0;
        scratch[i * used + i] = usable[i] ? (1 + ridge) * scratch[i * used + i] + DBL_MIN : 1;
        a[i] = usable[i];
    }
    int singular = solve(scratch, a, used);
    double sum = 0;
    for (size_t j = 0; j < used; j++) sum += a[j];
    for (size_t j = 0; j < used; j++) a[j] = singular ? j == newest : a[j] / sum;
}

// The weight 1 for the usable iterate of the smallest change.
static void choose(const double *gram, size_t apart, size_t used, size_t newest, const unsigned char *usable,
                   double *a) {
    size_t best = newest;
    for (size_t j = 0; j < used; j++) {
        a[j] = 0;
        if (usable[j] && gram[j * apart + j] < gram[best * apart + best]) best = j;
    }
    a[best] = 1;
}

// What Anderson's method keeps of its rows: `memory` changes and as many candidates of each, one after the other,
// the matrix of the changes' inner products, and, for restarts, the size of the smallest change since the last one,
// the same at the last look, and the number of the first iterate that the row may use. `norms` has the size of the
// newest change of each row, at every second place. `count` iterates came before; the newest lies at `count` modulo
// `memory`. With them the options: whether to look, the ridge of the weights, and how many times the smallest change a
// change may be.
struct rows_mix {
    const float *changes, *candidates; double *gram, *best, *before; int64_t *born; const double *norms; float *next;
    size_t rows, memory, n, count; int look; double ridge, growth; int threads;
};

// Whether a row whose newest change has this size is to restart: it has grown too much or, if that is looked at, none
// since the last look was smaller than the smallest then.
static int restarts(const struct rows_mix *h, size_t row) {
    double size = h->norms[2 * row];
    int restart = size > h->growth * h->best[row];
    if (size < h->best[row]) h->best[row] = size;
    if (h->look) {
        restart |= h->best[row] >= h->before[row];
        h->before[row] = h->best[row];
    }
    return restart;
}

// One step of Anderson's method for every row: enters the inner products of its newest change with all of them into its
// Gram matrix, and writes the combination of its candidates with the weights that follow to `next`.
// Returns -1 if there was no memory.
int64_t opteq_rows_mix(const struct rows_mix *h) {
    size_t rows = h->rows, memory = h->memory, n = h->n, count = h->count;
    size_t used = smaller(count + 1, memory), newest = count % memory;
    size_t stretches = (n + STRETCH - 1) / STRETCH, room = used * (used + 1);
    double *sums = malloc(sizeof(double) * rows * (stretches * used + room) + rows * used + 1);
    if (!sums) return -1;
    double *rooms = sums + rows * stretches * used;
    unsigned char *flags = (unsigned char *)(rooms + rows * room);
#pragma omp parallel num_threads(h->threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                const float *first = h->changes + row * memory * n + s * STRETCH;
                for (size_t j = 0; j < used; j++)
                    sums[(row * stretches + s) * used + j] =
                        dot(first + newest * n, first + j * n, smaller(STRETCH, n - s * STRETCH));
            }
#pragma omp for schedule(static)
        for (size_t row = 0; row < rows; row++) {
            double *gram = h->gram + row * memory * memory, *a = rooms + row * room;
            unsigned char *usable = flags + row * used;
            for (size_t j = 0; j < used; j++) {
                double sum = 0;
                for (size_t s = 0; s < stretches; s++) sum += sums[(row * stretches + s) * used + j];
                gram[newest * memory + j] = gram[j * memory + newest] = sum;
                usable[j] = (int64_t)(count - (newest + memory - j) % memory) >= h->born[row];
            }
            if (restarts(h, row)) {
                choose(gram, memory, used, newest, usable, a);
                h->best[row] = h->before[row] = INFINITY;
                h->born[row] = (int64_t)count + 1;
            } else
                weigh(gram, memory, used, newest, usable, h->ridge, a + used, a);
        }
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                const float *first = h->candidates + row * memory * n + s * STRETCH;
                const double *a = rooms + row * room;
                float *to = h->next + row * n + s * STRETCH;
                size_t width = smaller(STRETCH, n - s * STRETCH);
                for (size_t j = 0; j < used; j++) {
                    float weight = (float)a[j];
                    const float *from = first + j * n;
                    if (j == 0)
#pragma omp simd
                        for (size_t i = 0; i < width; i++) to[i] = weight * from[i];
                    else
#pragma omp simd
                        for (size_t i = 0; i < width; i++) to[i] += weight * from[i];
                }
            }
    }
    free(sums);
    return 0;
}

struct rows_hold {
    const float *x; size_t x_apart; const float *next; size_t next_apart; const unsigned char *active; float *to;
    size_t rows, n; int threads;
};

// Writes the rows of `next` to `to`, those of `x` for the rows that are no longer active.
int64_t opteq_rows_hold(const struct rows_hold *a) {
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (size_t row = 0; row < a->rows; row++) {
        const float *from = a->active[row] ? a->next + row * a->next_apart : a->x + row * a->x_apart;
        memcpy(a->to + row * a->n, from, sizeof(float) * a->n);
    }
    return 0;
}

// The record of the rows of a solve: which are still active, which have converged, and the step at which each ended.
// With them the options: the factor on residuals, the one that is small enough, and the least size that they are
// relative to.
struct rows_judge {
    const double *norms; unsigned char *active, *converged; int64_t *taken; double *residuals; size_t rows;
    int64_t step; double scale, tol, tiny;
};

// Judges every row by the norms of its change and of its image, which lie side by side: writes its relative residual,
// NaN if it is no longer active, and ends it where that is at most `tol` or the change is not finite. An image that is
// too large for its norm has come nowhere: its residual is infinite, not 0.
// Returns how many rows are still active and, times 2³², how many have a change that is not finite.
int64_t opteq_rows_judge(const struct rows_judge *a) {
    size_t going = 0, lost = 0;
    for (size_t row = 0; row < a->rows; row++) {
        double change = a->norms[2 * row], size = a->norms[2 * row + 1];
        lost += !isfinite(change);
        a->residuals[row] = NAN;
        if (!a->active[row]) continue;
        double residual = a->scale * change / (size < a->tiny ? a->tiny : size);
        if (isinf(size) && isfinite(change)) residual = INFINITY;
        a->residuals[row] = residual;
        a->converged[row] = residual <= a->tol;
        a->active[row] = !a->converged[row] && isfinite(change);
        if (a->active[row])
            going++;
        else
            a->taken[row] = a->step;
    }
    return going + (lost << 32);
}
