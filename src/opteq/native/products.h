// Products with a packed matrix, for float32.
//
// A matrix `u` of (in, out) is packed by panels of at most PANEL columns, the last one filled with zeros to whole
// vectors. A panel is its rows one after the other.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define VECTORS 2
#else
#error "written for processors with AVX2 or AVX-512"
#endif
#define ROWS 6
#define PANEL (LANES * VECTORS)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// A number of columns with those that fill the last vector.
static size_t filled(size_t columns) { return (columns + LANES - 1) / LANES * LANES; }

static float *room(size_t floats) { return aligned_alloc(64, (sizeof(float) * floats + 63) / 64 * 64); }

INLINE vec load(const float *from, size_t count) {
    if (count >= LANES) return *(const vec *)from;
    vec some = {0};
    for (size_t i = 0; i < count; i++) some[i] = from[i];
    return some;
}

INLINE void store(float *to, vec all, size_t count) {
    if (count >= LANES)
        *(vec *)to = all;
    else
        for (size_t i = 0; i < count; i++) to[i] = all[i];
}

// Packs one panel, of `columns` columns, whose element (i, k) lies at i * row_apart + k * column_apart.
static void pack(const float *from, size_t row_apart, size_t column_apart, float *panel, size_t in, size_t columns) {
    size_t width = filled(columns);
    if (column_apart == 1) {
        for (size_t i = 0; i < in; i++)
            for (size_t k = 0; k < width; k++) panel[i * width + k] = k < columns ? from[i * row_apart + k] : 0;
        return;
    }
    // By some rows at a time, since columns may lie far apart.
    for (size_t first = 0; first < in; first += LANES)
        for (size_t k = 0; k < width; k++)
            for (size_t i = first; i < smaller(in, first + LANES); i++)
                panel[i * width + k] = k < columns ? from[i * row_apart + k * column_apart] : 0;
}

// A product y = x u: element (r, c) of `x` lies at r * x_apart + c * x_step, the rows of `y` are `y_apart`.
typedef struct {
    size_t x_apart, x_step, y_apart, in;
} strides;

// `rows` × `vectors` of the product, kept in registers, or, with a `factor`, that many times it added to `y`.
INLINE void product(const float *x, const float *u, float *y, strides s, int rows, int vectors, size_t columns,
                    float factor) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < vectors; k++) sums[r][k] = (vec){0};
    for (size_t c = 0; c < s.in; c++) {
        const vec *row = (const vec *)(u + c * vectors * LANES);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < vectors; k++) sums[r][k] += x[r * s.x_apart + c * s.x_step] * row[k];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < vectors; k++) {
            float *to = y + r * s.y_apart + k * LANES;
            size_t count = columns - smaller(columns, k * LANES);
            if (factor) sums[r][k] = load(to, count) + factor * sums[r][k];
            store(to, sums[r][k], count);
        }
}

// With literal arguments each call is compiled for its own sizes.
INLINE void products(const float *x, const float *u, float *y, strides s, size_t rows, int vectors, size_t columns,
                     float factor) {
#define PRODUCT(rows) product(x, u, y, s, rows, vectors, columns, factor)
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * s.x_apart, y += ROWS * s.y_apart) PRODUCT(ROWS);
    switch (rows) {
        case 5: PRODUCT(5); break;
        case 4: PRODUCT(4); break;
        case 3: PRODUCT(3); break;
        case 2: PRODUCT(2); break;
        case 1: PRODUCT(1); break;
    }
#undef PRODUCT
}

// The product, or so many times it added to `y`, with one panel `u` of `columns` columns, for `rows` rows of `x`.
INLINE void any_panel(const float *x, const float *u, float *y, strides s, size_t rows, size_t columns, float factor) {
#define PRODUCTS(vectors) products(x, u, y, s, rows, vectors, columns, factor)
    switch (filled(columns) / LANES) {
#if VECTORS == 4
        case 4: PRODUCTS(4); break;
        case 3: PRODUCTS(3); break;
#endif
        case 2: PRODUCTS(2); break;
        case 1: PRODUCTS(1); break;
    }
#undef PRODUCTS
}

// y = x u for one panel `u`, where the numbers of a row of `x` follow one another.
static void panel(const float *x, size_t x_apart, const float *u, float *y, size_t y_apart, size_t in, size_t rows,
                  size_t columns) {
    any_panel(x, u, y, (strides){x_apart, 1, y_apart, in}, rows, columns, 0);
}
