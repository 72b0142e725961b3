// Forces on the patches of images with channels last, and their derivatives, in one pass over the images.
//
// A row of patches, as wide as the image, is gathered into a matrix with a row for each patch, multiplied by the
// matrix G of the patches' metric, and the result brought back to the pixels, all within the cache of one core. A
// patch is `size` × `size` pixels of `piece` channels, pixel by pixel.

#include <math.h>
#include <string.h>

#include "products.h"

// How an image is cut into patches.
typedef struct {
    size_t width, channels, size, piece;
} cutting;

// A literal count takes an instruction or two.
INLINE void copy(float *to, const float *from, size_t count) {
    switch (count) {
        case 4: memcpy(to, from, 4 * sizeof(float)); break;
        case 8: memcpy(to, from, 8 * sizeof(float)); break;
        case 16: memcpy(to, from, 16 * sizeof(float)); break;
        default: memcpy(to, from, count * sizeof(float));
    }
}

// Carries one row of patches from the pixels, the first of which is given, to a matrix, or back.
INLINE void carry(float *pixel, float *patches, cutting c, int back) {
    size_t groups = c.channels / c.piece, length = c.size * c.size * c.piece;
    for (size_t i = 0; i < c.size; i++)
        for (size_t x = 0; x < c.width; x++) {
            float *place = patches + x / c.size * groups * length + (i * c.size + x % c.size) * c.piece;
            for (size_t g = 0; g < groups; g++, pixel += c.piece, place += length)
                back ? copy(pixel, place, c.piece) : copy(place, pixel, c.piece);
        }
}

static float inner(const float *a, const float *b, size_t length) {
    vec sums = {0};
    float sum = 0;
    size_t k = 0;
    for (; k + LANES <= length; k += LANES) sums += *(const vec *)(a + k) * *(const vec *)(b + k);
    for (; k < length; k++) sum += a[k] * b[k];
    for (size_t lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

struct forces {
    float *images; const float *metric, *gamma, *projected, *weights;
    size_t batch, height, width, channels, size, piece; int threads;
};

// Overwrites images, which follow one another, of offsets r with the forces -e G r, e = exp(-γ rᵀG r). Where the
// patches p = G r and e of a state are given, overwrites images of changes q with those of the forces,
// e (2γ (pᵀq) p - G q). `gamma` has one number for each image, `metric` is G, contiguous. Returns -1 if there was no
// memory, and then nothing is changed.
int64_t opteq_forces(const struct forces *a) {
    cutting c = {a->width, a->channels, a->size, a->piece};
    size_t length = c.size * c.size * c.piece, rows = a->height / c.size, total = a->batch * rows;
    size_t count = c.width / c.size * (c.channels / c.piece), matrix = count * length;
    int threads = a->threads;
    float *packed = room(length * filled(length)), *space = room(2 * threads * matrix);
    int failed = !packed || !space;
    for (size_t o = 0; o < length && !failed; o += PANEL)
        pack(a->metric + o, length, 1, packed + o * length, length, smaller(PANEL, length - o));
#pragma omp parallel for schedule(static) num_threads(threads) if (!failed)
    for (int part = 0; part < threads; part++) {
        if (failed) continue;
        float *patches = space + 2 * part * matrix, *products = patches + matrix;
        for (size_t row = part * total / threads; row < (part + 1) * total / threads; row++) {
            float *pixels = a->images + row * c.size * c.width * c.channels;
            carry(pixels, patches, c, 0);
            for (size_t o = 0; o < length; o += PANEL)
                panel(patches, length, packed + o * length, products + o, length, length, count,
                      smaller(PANEL, length - o));
            for (size_t n = 0; n < count; n++) {
                float *r = patches + n * length, *g = products + n * length, rate = a->gamma[row / rows];
                if (a->projected) {
                    const float *p = a->projected + (row * count + n) * length;
                    float e = a->weights[row * count + n], shift = 2 * rate * inner(r, p, length);
                    for (size_t k = 0; k < length; k++) g[k] = e * (shift * p[k] - g[k]);
                } else {
                    float e = expf(-rate * inner(r, g, length));
                    for (size_t k = 0; k < length; k++) g[k] *= -e;
                }
            }
            carry(pixels, products, c, 1);
        }
    }
    free(packed);
    free(space);
    return -failed;
}
