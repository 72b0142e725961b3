// Products of many matrices with one, which is packed for them once. Sizes are counted in floats.

#include "products.h"

struct packed_pack {
    const float *matrix; size_t row_apart, column_apart; float *packed; size_t in, out; int threads;
};

// Packs `matrix` of (in, out), whose element (i, o) lies at i * row_apart + o * column_apart.
int64_t opteq_packed_pack(const struct packed_pack *a) {
    size_t in = a->in, out = a->out;
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (size_t o = 0; o < out; o += PANEL)
        pack(a->matrix + o * a->column_apart, a->row_apart, a->column_apart, a->packed + o * in, in,
             smaller(PANEL, out - o));
    return 0;
}

struct packed_multiply {
    const float *x; size_t apart; const float *packed; float *y; size_t rows, in, out; int threads;
};

// y = x packed, for `rows` rows of `x`, which are `apart`; those of `y` follow each other.
int64_t opteq_packed_multiply(const struct packed_multiply *a) {
    // Every thread has rows of its own, and reads the panels one after the other.
    size_t whole = (a->rows + ROWS - 1) / ROWS, in = a->in, out = a->out;
    int threads = a->threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        size_t first = part * whole / threads * ROWS, last = smaller(a->rows, (part + 1) * whole / threads * ROWS);
        for (size_t o = 0; o < out; o += PANEL)
            panel(a->x + first * a->apart, a->apart, a->packed + o * in, a->y + first * out + o, out, in, last - first,
                  smaller(PANEL, out - o));
    }
    return 0;
}

struct packed_gram {
    const float *x; size_t apart; const float *packed; float *y; size_t rows, in; int threads;
};

// y = x xᵀ for `rows` rows of `x`, which are `apart`, from the packed xᵀ. Computes half of it.
int64_t opteq_packed_gram(const struct packed_gram *a) {
    size_t rows = a->rows, in = a->in;
    float *y = a->y;
    // The first panels are the tall ones.
#pragma omp parallel for schedule(dynamic) num_threads(a->threads)
    for (size_t o = 0; o < rows; o += PANEL) {
        size_t columns = smaller(PANEL, rows - o);
        panel(a->x + o * a->apart, a->apart, a->packed + o * in, y + o * rows + o, rows, in, rows - o, columns);
        for (size_t first = o + columns; first < rows; first += LANES)
            for (size_t k = 0; k < columns; k++)
                for (size_t row = first; row < smaller(rows, first + LANES); row++)
                    y[(o + k) * rows + row] = y[row * rows + o + k];
    }
    return 0;
}

// As `panel`, also of rows whose numbers lie apart, and to be added to `y`. Not inlined, which takes compilers long.
static __attribute__((noinline)) void strided_panel(const float *x, const float *u, float *y, strides s, size_t rows,
                                                    size_t columns, float factor) {
    factor ? any_panel(x, u, y, s, rows, columns, factor) : any_panel(x, u, y, s, rows, columns, 0);
}

// A matrix for each sample: where the first begins, how far the next ones and its elements (i, k) are.
typedef struct {
    const float *first;
    size_t apart, row, column;
} matrices;

struct packed_each {
    matrices x, u; float *y; size_t batch, rows, in, out; float factor; int threads;
};

// y = x u sample by sample, or `factor` times it added to `y` of (batch, rows, out), contiguous. Returns -1 if
// there was no memory, and then nothing is changed.
int64_t opteq_packed_each(const struct packed_each *a) {
    matrices x = a->x, u = a->u;
    size_t batch = a->batch, rows = a->rows, in = a->in, out = a->out, size = in * filled(out);
    int threads = a->threads;
    float *space = room(threads * size);
    int failed = !space;
#pragma omp parallel for schedule(static) num_threads(threads) if (!failed)
    for (int part = 0; part < threads; part++) {
        if (failed) continue;
        float *packed = space + part * size;
        for (size_t b = part * batch / threads; b < (part + 1) * batch / threads; b++)
            for (size_t o = 0; o < out; o += PANEL) {
                size_t columns = smaller(PANEL, out - o);
                strides s = {x.row, x.column, out, in};
                pack(u.first + b * u.apart + o * u.column, u.row, u.column, packed, in, columns);
                strided_panel(x.first + b * x.apart, packed, a->y + b * rows * out + o, s, rows, columns, a->factor);
            }
    }
    free(space);
    return -failed;
}
