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

// A matrix that is some of the columns of another.
struct part {
    const float *rows;
    size_t apart, width;
};

// f = image and g = image - x, for an image of `count` parts side by side; `norms` gets those of each row of g and of
// f, which lie side by side.
// Returns 1 if there was no memory.
int opteq_rows_observe(const struct part *parts, size_t count, const float *restrict x, size_t x_apart,
                       float *restrict f, size_t f_apart, float *restrict g, size_t g_apart, size_t rows,
                       double *norms, int threads) {
    size_t most = 0;
    for (size_t k = 0; k < count; k++) most = parts[k].width > most ? parts[k].width : most;
    double *sums = malloc(2 * sizeof(double) * rows * ((most + STRETCH - 1) / STRETCH) + 1);
    if (!sums) return 1;
    for (size_t i = 0; i < 2 * rows; i++) norms[i] = 0;
    for (size_t k = 0; k < count; k++) {
        size_t n = parts[k].width, apart = parts[k].apart, stretches = (n + STRETCH - 1) / STRETCH;
        const float *image = parts[k].rows;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                size_t start = s * STRETCH, width = smaller(STRETCH, n - start);
                const float *value = image + row * apart + start, *from = x + row * x_apart + start;
                float *to = f + row * f_apart + start, *change = g + row * g_apart + start;
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
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++)
                for (int j = 0; j < 2; j++) norms[2 * row + j] += sums[2 * (row * stretches + s) + j];
        x += n, f += n, g += n;
    }
    for (size_t i = 0; i < 2 * rows; i++) norms[i] = sqrt(norms[i]);
    free(sums);
    return 0;
}

INLINE double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

// The first half of a step of conjugate gradients for every active row: x += a p and r -= a q, with q = A p,
// a = rr / <mp, q> and mp = M p. A row without curvature, <mp, q> not above 0, is no longer active. `lengths` gets
// the a of each row. `steps` counts the rows' steps, and `seen` gets the rr of those that take this one, else NaN.
void opteq_rows_descend(float *restrict x, float *restrict r, const float *restrict p, const float *restrict q,
                        const float *mp, const double *rr, unsigned char *active, int64_t *steps, double *seen,
                        double *lengths, size_t rows, size_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t row = 0; row < rows; row++) {
        lengths[row] = 0;
        seen[row] = NAN;
        if (!active[row]) continue;
        steps[row]++;
        seen[row] = rr[row];
        size_t start = row * n;
        double curvature = dot(mp + start, q + start, n);
        active[row] = curvature > 0;
        if (!active[row]) continue;
        lengths[row] = rr[row] / curvature;
        float a = (float)lengths[row];
#pragma omp simd
        for (size_t i = start; i < start + n; i++) {
            x[i] += a * p[i];
            r[i] -= a * q[i];
        }
    }
}

// The second half: the new rr = <r, mr> with mr = M r, and p = r + b p, mp = mr + b mp with b its ratio to the
// old one. A row that has reached the goal is no longer active. `mp` may be `p`, if `mr` is `r`. `seen` gets the new rr
// of the rows that took the step. Returns how many are still active.
size_t opteq_rows_turn(float *restrict p, float *mp, const float *restrict r, const float *mr, double *rr, double goal,
                       unsigned char *active, double *seen, size_t rows, size_t n, int threads) {
    size_t going = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : going)
    for (size_t row = 0; row < rows; row++) {
        if (!active[row]) continue;
        size_t start = row * n;
        double before = rr[row], now = dot(r + start, mr + start, n);
        seen[row] = rr[row] = now < 0 ? 0 : now;
        active[row] = rr[row] > goal;
        if (!active[row]) continue;
        going++;
        float b = (float)(now / before);
#pragma omp simd
        for (size_t i = start; i < start + n; i++) p[i] = r[i] + b * p[i];
        if (mp == p) continue;
#pragma omp simd
        for (size_t i = start; i < start + n; i++) mp[i] = mr[i] + b * mp[i];
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

// Whether a row whose newest change has this size is to restart: it is more than `growth` times the smallest since the
// last restart, `best`, or, if that is looked at, none since the last look was smaller than the smallest then, `before`.
static int restarts(double *best, double *before, double size, int look, double growth) {
    int restart = size > growth * *best;
    if (size < *best) *best = size;
    if (look) {
        restart |= *best >= *before;
        *before = *best;
    }
    return restart;
}

// One step of Anderson's method for every row, which keeps `memory` changes and as many candidates, one after the
// other: enters the inner products of its newest change with all of them into its `gram` matrix, and writes the
// combination of its candidates with the weights that follow to `next`. `count` iterates came before; the newest lies at
// `count` modulo `memory`, and the first one that the row may use has the number `born`. `norms` has the size of the
// newest change of each row, at every second place.
// Returns 1 if there was no memory.
int opteq_rows_mix(const float *changes, const float *candidates, double *grams, double *best, double *before,
                   int64_t *born, const double *norms, float *restrict next, size_t rows, size_t memory, size_t n,
                   size_t count, int look, double ridge, double growth, int threads) {
    size_t used = smaller(count + 1, memory), newest = count % memory;
    size_t stretches = (n + STRETCH - 1) / STRETCH, room = used * (used + 1);
    double *sums = malloc(sizeof(double) * rows * (stretches * used + room) + rows * used + 1);
    if (!sums) return 1;
    double *rooms = sums + rows * stretches * used;
    unsigned char *flags = (unsigned char *)(rooms + rows * room);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                const float *first = changes + row * memory * n + s * STRETCH;
                for (size_t j = 0; j < used; j++)
                    sums[(row * stretches + s) * used + j] =
                        dot(first + newest * n, first + j * n, smaller(STRETCH, n - s * STRETCH));
            }
#pragma omp for schedule(static)
        for (size_t row = 0; row < rows; row++) {
            double *gram = grams + row * memory * memory, *a = rooms + row * room;
            unsigned char *usable = flags + row * used;
            for (size_t j = 0; j < used; j++) {
                double sum = 0;
                for (size_t s = 0; s < stretches; s++) sum += sums[(row * stretches + s) * used + j];
                gram[newest * memory + j] = gram[j * memory + newest] = sum;
                usable[j] = (int64_t)(count - (newest + memory - j) % memory) >= born[row];
            }
            if (restarts(best + row, before + row, norms[2 * row], look, growth)) {
                choose(gram, memory, used, newest, usable, a);
                best[row] = before[row] = INFINITY;
                born[row] = (int64_t)count + 1;
            } else
                weigh(gram, memory, used, newest, usable, ridge, a + used, a);
        }
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                const float *first = candidates + row * memory * n + s * STRETCH;
                const double *a = rooms + row * room;
                float *to = next + row * n + s * STRETCH;
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

// Writes the rows of `next` to `to`, those of `x` for the rows that are no longer active.
void opteq_rows_hold(const float *restrict x, size_t x_apart, const float *restrict next, size_t next_apart,
                     const unsigned char *active, float *restrict to, size_t rows, size_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t row = 0; row < rows; row++)
        memcpy(to + row * n, active[row] ? next + row * next_apart : x + row * x_apart, sizeof(float) * n);
}

// Judges every row by the norms of its change and of its image, which lie side by side: writes its relative residual,
// `scale` times their ratio, NaN if it is no longer active, and ends it where that is at most `tol` or the change is not
// finite. A size counts as `tiny` at least, and an image that is too large for its norm has come nowhere: its residual is
// infinite, not 0. With a row that ends go whether it has converged and the `step` at which that was.
// `counts` gets how many rows are still active, and how many have a change that is not finite.
void opteq_rows_judge(const double *norms, unsigned char *active, unsigned char *converged, int64_t *taken,
                      double *residuals, int64_t *counts, size_t rows, int64_t step, double scale, double tol,
                      double tiny, int threads) {
    (void)threads;  // there is too little to do for more than one
    counts[0] = counts[1] = 0;
    for (size_t row = 0; row < rows; row++) {
        double change = norms[2 * row], size = norms[2 * row + 1];
        counts[1] += !isfinite(change);
        residuals[row] = NAN;
        if (!active[row]) continue;
        residuals[row] = scale * change / (size < tiny ? tiny : size);
        if (isinf(size) && isfinite(change)) residuals[row] = INFINITY;
        converged[row] = residuals[row] <= tol;
        active[row] = !converged[row] && isfinite(change);
        if (active[row])
            counts[0]++;
        else
            taken[row] = step;
    }
}
