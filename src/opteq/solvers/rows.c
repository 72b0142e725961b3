// What solvers do with the rows of float32 matrices, one row per sample, in one pass over memory, and with the
// small systems of each sample.
//
// Rows are contiguous and `apart` numbers from each other. Their sums are taken in float64, over stretches that
// are added up in their order, so that they depend on nothing else.

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#define STRETCH 2048
#define INLINE static inline __attribute__((always_inline))

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// f = image and g = image - x; adds the squares of g and of f to the two numbers of each row in `squares`.
// Returns 1 if there was no memory.
int opteq_rows_observe(const float *restrict image, size_t image_apart, const float *restrict x, size_t x_apart,
                       float *restrict f, size_t f_apart, float *restrict g, size_t g_apart, size_t rows,
                       size_t n, double *squares, int threads) {
    size_t stretches = (n + STRETCH - 1) / STRETCH;
    double *sums = malloc(2 * sizeof(double) * rows * stretches + 1);
    if (!sums) return 1;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (size_t row = 0; row < rows; row++)
        for (size_t s = 0; s < stretches; s++) {
            size_t start = s * STRETCH, count = smaller(STRETCH, n - start);
            const float *value = image + row * image_apart + start, *from = x + row * x_apart + start;
            float *to = f + row * f_apart + start, *change = g + row * g_apart + start;
            double moved = 0, size = 0;
#pragma omp simd reduction(+ : moved, size)
            for (size_t i = 0; i < count; i++) {
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
            for (int k = 0; k < 2; k++) squares[2 * row + k] += sums[2 * (row * stretches + s) + k];
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
// a = rr / <mp, q> and mp = M p. A row without curvature, <mp, q> not above 0, is no longer active.
void opteq_rows_descend(float *restrict x, float *restrict r, const float *restrict p, const float *restrict q,
                        const float *mp, const double *rr, unsigned char *active, size_t rows, size_t n,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t row = 0; row < rows; row++) {
        if (!active[row]) continue;
        size_t start = row * n;
        double curvature = dot(mp + start, q + start, n);
        active[row] = curvature > 0;
        if (!active[row]) continue;
        float a = (float)(rr[row] / curvature);
#pragma omp simd
        for (size_t i = start; i < start + n; i++) {
            x[i] += a * p[i];
            r[i] -= a * q[i];
        }
    }
}

// The second half: the new rr = <r, mr> with mr = M r, and p = r + b p, mp = mr + b mp with b its ratio to the
// old one. A row that has reached the goal is no longer active. `mp` may be `p`, if `mr` is `r`.
void opteq_rows_turn(float *restrict p, float *mp, const float *restrict r, const float *mr, double *rr, double goal,
                     unsigned char *active, size_t rows, size_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t row = 0; row < rows; row++) {
        if (!active[row]) continue;
        size_t start = row * n;
        double before = rr[row], now = dot(r + start, mr + start, n);
        rr[row] = now < 0 ? 0 : now;
        active[row] = rr[row] > goal;
        if (!active[row]) continue;
        float b = (float)(now / before);
#pragma omp simd
        for (size_t i = start; i < start + n; i++) p[i] = r[i] + b * p[i];
        if (mp == p) continue;
#pragma omp simd
        for (size_t i = start; i < start + n; i++) mp[i] = mr[i] + b * mp[i];
    }
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
// their changes. Where that is no regular system the newest iterate gets all the weight, and the best usable one
// if the row is to restart. `scratch` has room for a matrix.
static void weigh(const double *gram, size_t apart, size_t used, size_t newest, const unsigned char *usable,
                  int restart, double ridge, double *scratch, double *a) {
    if (restart) {
        size_t best = newest;
        for (size_t j = 0; j < used; j++) {
            a[j] = 0;
            if ((!usable || usable[j]) && gram[j * apart + j] < gram[best * apart + best]) best = j;
        }
        a[best] = 1;
        return;
    }
    for (size_t i = 0; i < used; i++) {
        int here = !usable || usable[i];
        for (size_t j = 0; j < used; j++)
            scratch[i * used + j] = here && (!usable || usable[j]) ? gram[i * apart + j] : 0;
        scratch[i * used + i] = here ? (1 + ridge) * scratch[i * used + i] + DBL_MIN : 1;
        a[i] = here;
    }
    int singular = solve(scratch, a, used);
    double sum = 0;
    for (size_t j = 0; j < used; j++) sum += a[j];
    for (size_t j = 0; j < used; j++) a[j] = singular ? j == newest : a[j] / sum;
}

// One step of Anderson's method for every row: enters the inner products of its newest change, at place `newest` of
// `used`, with all of them into its Gram matrix, and writes the combination of its candidates with the weights that
// follow. A row has room for `memory` changes, as many candidates and a matrix of that side. `usable` tells which
// of the `used` a row may take, `restarts` which rows go back to their best; both may be absent.
// Returns 1 if there was no memory.
int opteq_rows_mix(const float *restrict changes, const float *restrict candidates, double *restrict gram,
                   const unsigned char *usable, const unsigned char *restarts, double ridge, float *restrict next,
                   size_t rows, size_t memory, size_t n, size_t used, size_t newest, int threads) {
    size_t stretches = (n + STRETCH - 1) / STRETCH, room = used * (used + 1);
    double *sums = malloc(sizeof(double) * (rows * (stretches * used + room)) + 1);
    if (!sums) return 1;
    double *rooms = sums + rows * stretches * used;
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
            double *own = gram + row * memory * memory, *a = rooms + row * room;
            for (size_t j = 0; j < used; j++) {
                double sum = 0;
                for (size_t s = 0; s < stretches; s++) sum += sums[(row * stretches + s) * used + j];
                own[newest * memory + j] = own[j * memory + newest] = sum;
            }
            weigh(own, memory, used, newest, usable ? usable + row * used : NULL, restarts && restarts[row], ridge,
                  a + used, a);
        }
#pragma omp for collapse(2) schedule(static)
        for (size_t row = 0; row < rows; row++)
            for (size_t s = 0; s < stretches; s++) {
                const float *first = candidates + row * memory * n + s * STRETCH;
                const double *a = rooms + row * room;
                float *to = next + row * n + s * STRETCH;
                size_t count = smaller(STRETCH, n - s * STRETCH);
                for (size_t j = 0; j < used; j++) {
                    float weight = (float)a[j];
                    const float *from = first + j * n;
                    if (j == 0)
#pragma omp simd
                        for (size_t i = 0; i < count; i++) to[i] = weight * from[i];
                    else
#pragma omp simd
                        for (size_t i = 0; i < count; i++) to[i] += weight * from[i];
                }
            }
    }
    free(sums);
    return 0;
}
