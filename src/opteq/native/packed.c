// Products of many matrices with one, which is packed for them once. Sizes are counted in floats.

#include "products.h"

// Packs `matrix` of (in, out), whose element (i, o) lies at i * row_apart + o * column_apart.
void opteq_packed_pack(const float *matrix, size_t row_apart, size_t column_apart, float *packed, size_t in, size_t out,
                       int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t o = 0; o < out; o += PANEL)
        pack(matrix + o * column_apart, row_apart, column_apart, packed + o * in, in, smaller(PANEL, out - o));
}

// y = x packed, for `rows` rows of `x`, which are `apart`; those of `y` follow each other.
void opteq_packed_multiply(const float *x, size_t apart, const float *packed, float *y, size_t rows, size_t in,
                           size_t out, int threads) {
    // Every thread has rows of its own, and reads the panels one after the other.
    size_t whole = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        size_t first = part * whole / threads * ROWS, last = smaller(rows, (part + 1) * whole / threads * ROWS);
        for (size_t o = 0; o < out; o += PANEL)
            panel(x + first * apart, apart, packed + o * in, y + first * out + o, out, in, last - first,
                  smaller(PANEL, out - o));
    }
}

// y = x xᵀ for `rows` rows of `x`, which are `apart`, from the packed xᵀ. Computes half of it.
void opteq_packed_gram(const float *x, size_t apart, const float *packed, float *y, size_t rows, size_t in,
                       int threads) {
    // The first panels are the tall ones.
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (size_t o = 0; o < rows; o += PANEL) {
        size_t columns = smaller(PANEL, rows - o);
        panel(x + o * apart, apart, packed + o * in, y + o * rows + o, rows, in, rows - o, columns);
        for (size_t first = o + columns; first < rows; first += LANES)
            for (size_t k = 0; k < columns; k++)
                for (size_t row = first; row < smaller(rows, first + LANES); row++)
                    y[(o + k) * rows + row] = y[row * rows + o + k];
    }
}

// As `panel`, also of rows whose numbers lie apart, and to be added to `y`. Not inlined, which takes compilers long.
static __attribute__((noinline)) void strided_panel(const float *x, const float *u, float *y, strides s, size_t rows,
                                                    size_t columns, float factor) {
    factor ? any_panel(x, u, y, s, rows, columns, factor) : any_panel(x, u, y, s, rows, columns, 0);
}

// y = x u sample by sample, or `factor` times it added to `y` of (batch, rows, out), contiguous. The matrices of `x`
// are `x_apart`, and the elements (r, i) of each lie at r * x_row + i * x_column; those of `u` likewise. Returns whether
// there was no memory, and then nothing is changed.
int opteq_packed_each(const float *x, size_t x_apart, size_t x_row, size_t x_column, const float *u, size_t u_apart,
                      size_t u_row, size_t u_column, float *y, size_t batch, size_t rows, size_t in, size_t out,
                      float factor, int threads) {
    size_t size = in * filled(out);
    float *space = room(threads * size);
    int failed = !space;
#pragma omp parallel for schedule(static) num_threads(threads) if (!failed)
    for (int part = 0; part < threads; part++) {
        if (failed) continue;
        float *packed = space + part * size;
        for (size_t b = part * batch / threads; b < (part + 1) * batch / threads; b++)
            for (size_t o = 0; o < out; o += PANEL) {
                size_t columns = smaller(PANEL, out - o);
                const float *left = x + b * x_apart;
                float *to = y + b * rows * out + o;
                strides s = {x_row, x_column, out, in};
                pack(u + b * u_apart + o * u_column, u_row, u_column, packed, in, columns);
                strided_panel(left, packed, to, s, rows, columns, factor);
            }
    }
    free(space);
    return failed;
}
