// 3×3 convolutions by Winograd's minimal filtering F(4×4, 3×3), for float32 images with channels last.
//
// An output tile Y of 4×4 pixels, from the 6×6 pixels d around it and the kernel g, is
//
//     Y = Aᵀ [(G g Gᵀ) ∘ (Bᵀ d B)] A
//
// with the matrices of Lavin and Gray 2016, Section 4.3: 36 products in place of 144. Summed over the input
// channels the elementwise product becomes one matrix product for each of its 36 points. A block of tiles is
// carried from its pixels to its results before the next one is begun, so that all of it stays in the cache
// of one core. No pixel depends on which tiles share a block, and so none on batch or threads.
//
// The derivative by the kernel has the same parts transposed: for an upstream Y it is Gᵀ [(Bᵀ d B) ∘ (A Y Aᵀ)] G,
// summed over the tiles.
//
// Images are given with channels last, `x` of (batch, height, width, in) and `y` of (batch, height, width, out);
// only from one image to the next there may be a gap. Sizes are counted in floats.

#include <omp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define POINTS 36
// Tiles in a block, and tiles times channels: about half a megabyte for the 36 points of both sides.
#define MOST_TILES 18
#define MOST_COLUMNS 3100

// Bᵀ times six pixels.
INLINE void input_transform(const vec *d, vec *out, int out_step) {
    vec even = d[4] - 4 * d[2], odd = d[3] - 4 * d[1];
    vec far = d[4] - d[2], slope = 2 * (d[3] - d[1]);
    out[0] = 4 * d[0] - 5 * d[2] + d[4];
    out[out_step] = even + odd;
    out[2 * out_step] = even - odd;
    out[3 * out_step] = far + slope;
    out[4 * out_step] = far - slope;
    out[5 * out_step] = 4 * d[1] - 5 * d[3] + d[5];
}

// Aᵀ times six points `step` apart.
INLINE void output_transform(const vec *m, vec *out, int step) {
    vec sum = m[step] + m[2 * step], difference = m[step] - m[2 * step];
    vec far_sum = m[3 * step] + m[4 * step], far_difference = m[3 * step] - m[4 * step];
    out[0] = m[0] + sum + far_sum;
    out[step] = difference + 2 * far_difference;
    out[2 * step] = sum + 4 * far_sum;
    out[3 * step] = difference + 8 * far_difference + m[5 * step];
}

// G times three numbers `step` apart.
INLINE void kernel_transform(const vec *g, vec *out, int step, int out_step) {
    vec ends = g[0] + g[2 * step], far = (g[0] + 4 * g[2 * step]) * (1.f / 24), slope = g[step] * (1.f / 12);
    out[0] = g[0] * .25f;
    out[out_step] = (ends + g[step]) * (-1.f / 6);
    out[2 * out_step] = (ends - g[step]) * (-1.f / 6);
    out[3 * out_step] = far + slope;
    out[4 * out_step] = far - slope;
    out[5 * out_step] = g[2 * step];
}

// Gᵀ times six points `step` apart.
INLINE void kernel_adjoint(const vec *u, vec *out, int step, int out_step) {
    vec sum = u[step] + u[2 * step], far_sum = u[3 * step] + u[4 * step];
    vec difference = u[2 * step] - u[step], far_difference = u[3 * step] - u[4 * step];
    out[0] = u[0] * .25f - sum * (1.f / 6) + far_sum * (1.f / 24);
    out[out_step] = difference * (1.f / 6) + far_difference * (1.f / 12);
    out[2 * out_step] = (far_sum - sum) * (1.f / 6) + u[5 * step];
}

// A times four pixels.
INLINE void output_adjoint(const vec *y, vec *out, int out_step) {
    vec even = y[0] + y[2], odd = y[1] + y[3];
    vec far_even = y[0] + 4 * y[2], far_odd = 2 * y[1] + 8 * y[3];
    out[0] = y[0];
    out[out_step] = even + odd;
    out[2 * out_step] = even - odd;
    out[3 * out_step] = far_even + far_odd;
    out[4 * out_step] = far_even - far_odd;
    out[5 * out_step] = y[3];
}

struct winograd_kernels {
    const float *weight; float *kernels; size_t out, in; int adjoint, threads;
};

// The kernels of the convolution with `weight`, contiguous `(out, in, 3, 3)`, or, with `adjoint`, of its
// adjoint, whose input channels are `out`. For each point they are one packed matrix.
int64_t opteq_winograd_kernels(const struct winograd_kernels *a) {
    const float *weight = a->weight;
    size_t in = a->in, adjoint = a->adjoint, from = adjoint ? a->out : in, to = adjoint ? in : a->out, columns = filled(to);
#pragma omp parallel for num_threads(a->threads) schedule(static)
    for (size_t c = 0; c < from; c++)
        for (size_t o = 0; o < to; o += LANES) {
            vec g[9], half[18], u[36];
            for (int k = 0; k < 9; k++)
                for (size_t lane = 0; lane < LANES; lane++) {
                    size_t pair = adjoint ? c * in + o + lane : (o + lane) * in + c;
                    g[k][lane] = o + lane < to ? weight[9 * pair + (adjoint ? 8 - k : k)] : 0;
                }
            for (int l = 0; l < 3; l++) kernel_transform(g + l, half + l, 3, 3);
            for (int k = 0; k < 6; k++) kernel_transform(half + 3 * k, u + 6 * k, 1, 1);
            size_t start = o - o % PANEL, width = smaller(PANEL, columns - start);
            for (int p = 0; p < POINTS; p++)
                *(vec *)(a->kernels + p * from * columns + start * from + c * width + o - start) = u[p];
        }
    return 0;
}

static void panels(const float *v, const float *u, float *m, size_t in, size_t out, size_t tiles) {
    for (size_t o = 0; o < out; o += PANEL, u += in * PANEL)
        panel(v, filled(in), u, m + o, out, in, tiles, smaller(PANEL, out - o));
}

// How images are cut into tiles, and tiles into blocks for the threads, of at most `block` tiles.
typedef struct {
    size_t height, width, across, per_image, total, block, blocks;
} tiling;

static tiling cut(size_t batch, size_t height, size_t width, size_t columns, int threads) {
    tiling c = {.height = height, .width = width, .across = (width + 3) / 4};
    c.per_image = (height + 3) / 4 * c.across;
    c.total = batch * c.per_image;
    size_t most = MOST_TILES;
    while (most > ROWS && most * columns > MOST_COLUMNS) most -= ROWS;
    // As many for each thread, unless they were too small for the products to be fast.
    c.blocks = (c.total + most - 1) / most;
    c.blocks = (c.blocks + threads - 1) / threads * threads;
    size_t sensible = (c.total + ROWS - 1) / ROWS;
    if (c.blocks > sensible) c.blocks = sensible;
    c.block = c.blocks ? (c.total + c.blocks - 1) / c.blocks : 0;
    return c;
}

// From one point of a block to the next. An odd number of cache lines, for with a power of two of them all 36
// would share a few places of the cache.
static size_t point_apart(tiling c, size_t columns) {
    size_t lines = (c.block * columns + 15) / 16;
    return 16 * (lines + 1 - lines % 2);
}

// The first tile of a block, of which none has a tile more than another but one.
static size_t first_tile(tiling c, size_t block) { return block * c.total / c.blocks; }

// Where a tile begins in an image, and whether it and its neighbours lie within.
typedef struct {
    const float *image; ptrdiff_t top, left; int inside;
} square;

static square place(const float *images, size_t apart, size_t tile, tiling c, int size, int margin) {
    size_t n = tile / c.per_image, k = tile % c.per_image;
    square s = {images + n * apart, (ptrdiff_t)(k / c.across * 4) - margin, (ptrdiff_t)(k % c.across * 4) - margin, 0};
    s.inside = s.top >= 0 && s.left >= 0 && s.top + size <= (ptrdiff_t)c.height && s.left + size <= (ptrdiff_t)c.width;
    return s;
}

// The pixels of column `l` of a square, `count` channels of them, with zeros outside the image.
INLINE void column(square s, vec *pixels, int size, int l, tiling c, size_t channels, size_t o) {
    ptrdiff_t height = c.height, width = c.width, x = s.left + l;
    int whole = s.inside && channels - o >= LANES;
    for (int k = 0; k < size; k++) {
        ptrdiff_t y = s.top + k;
        int padding = !whole && (y < 0 || y >= height || x < 0 || x >= width);
        pixels[k] = padding ? (vec){0} : load(s.image + (y * width + x) * channels + o, whole ? LANES : channels - o);
    }
}

// Bᵀ d B of the tiles of one block, or, with `adjoint`, A Y Aᵀ: for each point a matrix (tiles, channels).
INLINE void enter_points(const float *x, float *v, size_t first, size_t tiles, tiling c, size_t channels, size_t apart,
                         int adjoint) {
    size_t columns = filled(channels), points = point_apart(c, columns);
    int size = adjoint ? 4 : 6;
    for (size_t t = 0; t < tiles; t++) {
        square s = place(x, apart, first + t, c, size, adjoint ? 0 : 1);
        for (size_t o = 0; o < channels; o += LANES) {
            vec d[6], half[36];
            for (int l = 0; l < size; l++) {
                column(s, d, size, l, c, channels, o);
                adjoint ? output_adjoint(d, half + l, size) : input_transform(d, half + l, size);
            }
            for (int k = 0; k < 6; k++) {
                adjoint ? output_adjoint(half + size * k, d, 1) : input_transform(half + size * k, d, 1);
                for (int l = 0; l < 6; l++) *(vec *)(v + (6 * k + l) * points + t * columns + o) = d[l];
            }
        }
    }
}

// With literal arguments each is compiled for itself.
static void enter(const float *x, float *v, size_t first, size_t tiles, tiling c, size_t channels, size_t apart) {
    enter_points(x, v, first, tiles, c, channels, apart, 0);
}

static void enter_adjoint(const float *y, float *m, size_t first, size_t tiles, tiling c, size_t channels,
                          size_t apart) {
    enter_points(y, m, first, tiles, c, channels, apart, 1);
}

// The pixels Aᵀ m A of the tiles of one block.
static void leave(const float *m, float *y, size_t first, size_t tiles, tiling c, size_t channels) {
    size_t columns = filled(channels), apart = point_apart(c, columns);
    for (size_t t = 0; t < tiles; t++) {
        size_t n = (first + t) / c.per_image, tile = (first + t) % c.per_image;
        size_t top = tile / c.across * 4, left = tile % c.across * 4;
        float *image = y + n * c.height * c.width * channels;
        for (size_t o = 0; o < channels; o += LANES) {
            vec points[36], half[24], pixels[16];
            for (int p = 0; p < POINTS; p++) points[p] = *(const vec *)(m + p * apart + t * columns + o);
            for (int l = 0; l < 6; l++) output_transform(points + l, half + l, 6);
            for (int k = 0; k < 4; k++) output_transform(half + 6 * k, pixels + 4 * k, 1);
            for (size_t k = 0; k < smaller(4, c.height - top); k++)
                for (size_t l = 0; l < smaller(4, c.width - left); l++) {
                    float *to = image + ((top + k) * c.width + left + l) * channels + o;
                    store(to, pixels[4 * k + l], channels - o);
                }
        }
    }
}

struct winograd_convolve {
    const float *x, *kernels; float *y; size_t batch, height, width, in, out, apart; int threads;
};

// `y = w * x` with one pixel of zeros around, from the kernels of `w`. The images of `x` are `apart`. Returns
// a negative number if there was no memory, with which `y` is incomplete.
int64_t opteq_winograd_convolve(const struct winograd_convolve *a) {
    size_t in = a->in, rows = filled(in), columns = filled(a->out);
    tiling c = cut(a->batch, a->height, a->width, rows + columns, a->threads);
    size_t v_apart = point_apart(c, rows), m_apart = point_apart(c, columns);
    int failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(+ : failed)
    {
        float *v = room(POINTS * v_apart), *m = room(POINTS * m_apart);
        failed += !v || !m;
#pragma omp for schedule(static)
        for (size_t b = 0; b < c.blocks; b++) {
            if (!v || !m) continue;
            size_t first = first_tile(c, b), tiles = first_tile(c, b + 1) - first;
            enter(a->x, v, first, tiles, c, in, a->apart);
            for (int p = 0; p < POINTS; p++)
                panels(v + p * v_apart, a->kernels + p * in * columns, m + p * m_apart, in, columns, tiles);
            leave(m, a->y, first, tiles, c, a->out);
        }
        free(v);
        free(m);
    }
    return -failed;
}

// Adds `rows` × `vectors · LANES` numbers of vᵀ m.
INLINE void outer(const float *v, const float *m, float *u, size_t in, size_t out, size_t tiles, int rows,
                  int vectors) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < vectors; k++) sums[r][k] = *(vec *)(u + r * out + k * LANES);
    for (size_t t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < vectors; k++)
                sums[r][k] += v[t * in + r] * *(const vec *)(m + t * out + k * LANES);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < vectors; k++) *(vec *)(u + r * out + k * LANES) = sums[r][k];
}

// Adds vᵀ m; both numbers of channels fill their vectors.
static void outer_panels(const float *v, const float *m, float *u, size_t in, size_t out, size_t tiles) {
    for (size_t o = 0; o < out; o += PANEL) {
        int vectors = smaller(PANEL, out - o) / LANES;
        for (size_t i = 0; i < in; i += 4) {
            const float *from = v + i, *with = m + o;
            float *to = u + i * out + o;
            switch (vectors) {
#if VECTORS == 4
                case 4: outer(from, with, to, in, out, tiles, 4, 4); break;
                case 3: outer(from, with, to, in, out, tiles, 4, 3); break;
#endif
                case 2: outer(from, with, to, in, out, tiles, 4, 2); break;
                case 1: outer(from, with, to, in, out, tiles, 4, 1); break;
            }
        }
    }
}

struct winograd_gradient {
    const float *x, *y; float *gradient, *sums; size_t batch, height, width, in, out, x_apart, y_apart; int threads;
};

// The gradient of <y, w * x> by `w`, contiguous `(out, in, 3, 3)`. `sums` has room for 36 matrices of the filled
// numbers of channels for each thread. Returns a negative number if there was no memory, with which it is
// incomplete.
int64_t opteq_winograd_gradient(const struct winograd_gradient *a) {
    size_t in = a->in, out = a->out, rows = filled(in), columns = filled(out), size = POINTS * rows * columns;
    tiling c = cut(a->batch, a->height, a->width, rows + columns, a->threads);
    size_t v_apart = point_apart(c, rows), m_apart = point_apart(c, columns);
    int failed = 0, team = 1;
#pragma omp parallel num_threads(a->threads) reduction(+ : failed)
    {
        float *u = a->sums + omp_get_thread_num() * size;
        float *v = room(POINTS * v_apart), *m = room(POINTS * m_apart);
        failed += !v || !m;
        memset(u, 0, sizeof(float) * size);
#pragma omp single
        team = omp_get_num_threads();
#pragma omp for schedule(static)
        for (size_t b = 0; b < c.blocks; b++) {
            if (!v || !m) continue;
            size_t first = first_tile(c, b), tiles = first_tile(c, b + 1) - first;
            enter(a->x, v, first, tiles, c, in, a->x_apart);
            enter_adjoint(a->y, m, first, tiles, c, out, a->y_apart);
            for (int p = 0; p < POINTS; p++)
                outer_panels(v + p * v_apart, m + p * m_apart, u + p * rows * columns, rows, columns, tiles);
        }
        free(v);
        free(m);
#pragma omp for schedule(static)
        for (size_t i = 0; i < in; i++)
            for (size_t o = 0; o < out; o += LANES) {
                vec points[36], half[18], g[9];
                for (int p = 0; p < POINTS; p++) {
                    points[p] = (vec){0};
                    for (int k = 0; k < team; k++)
                        points[p] += *(vec *)(a->sums + k * size + (p * rows + i) * columns + o);
                }
                for (int l = 0; l < 6; l++) kernel_adjoint(points + l, half + l, 6, 6);
                for (int k = 0; k < 3; k++) kernel_adjoint(half + 6 * k, g + 3 * k, 1, 1);
                for (size_t lane = 0; lane < smaller(LANES, out - o); lane++)
                    for (int k = 0; k < 9; k++) a->gradient[9 * ((o + lane) * in + i) + k] = g[k][lane];
            }
    }
    return -failed;
}
