// What solvers do with the rows of float32 matrices, one row per sample, in one pass over memory, and with the
// small systems of each sample.
//
// Rows are contiguous and `apart` numbers from each other. Their sums are taken in float64, over stretches that
// are added up in their order, so that they depend on nothing else.

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

// Solves `count` systems of `n` equations with one right-hand side each by elimination with row pivoting, in
// place: `matrix` is used up, `b` becomes the solution. `singular` tells where a pivot was 0 or not finite.
void opteq_rows_solve(double *matrix, double *b, unsigned char *singular, size_t count, size_t n) {
    for (size_t s = 0; s < count; s++, matrix += n * n, b += n) {
        singular[s] = 0;
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
            if (!(fabs(head) > 0) || !isfinite(head)) singular[s] = 1;
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
    }
}
