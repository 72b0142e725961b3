// Means over blocks of pixels and their adjoint, for float32 images with channels last, between whose images there
// may be gaps. Sizes are counted in floats.

#include "products.h"

struct pooling_average {
    const float *x; float *y; size_t batch, height, width, channels, factor, apart; int threads;
};

// `y` of (batch, height, width, channels): the means over `factor` × `factor` pixels of `x`, whose images are `apart`.
int64_t opteq_pooling_average(const struct pooling_average *a) {
    size_t channels = a->channels, factor = a->factor, row = a->width * factor * channels;
    float size = factor * factor;
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (size_t line = 0; line < a->batch * a->height; line++) {
        const float *from = a->x + line / a->height * a->apart + line % a->height * factor * row;
        float *to = a->y + line * a->width * channels;
        for (size_t x = 0; x < a->width; x++, from += factor * channels, to += channels)
            for (size_t o = 0; o < channels; o += LANES) {
                vec sum = {0};
                for (size_t k = 0; k < factor; k++)
                    for (size_t l = 0; l < factor; l++) sum += load(from + k * row + l * channels + o, channels - o);
                store(to + o, sum / size, channels - o);
            }
    }
    return 0;
}

struct pooling_spread {
    const float *y; float *x; size_t batch, height, width, channels, factor, apart; int add, threads;
};

// The adjoint, `x` of `height · factor` × `width · factor` pixels from `y`, or that added to it.
int64_t opteq_pooling_spread(const struct pooling_spread *a) {
    size_t channels = a->channels, factor = a->factor, height = a->height * factor;
    float size = factor * factor;
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (size_t line = 0; line < a->batch * height; line++) {
        const float *from = a->y + line / factor * a->width * channels;
        float *to = a->x + line / height * a->apart + line % height * a->width * factor * channels;
        for (size_t x = 0; x < a->width; x++, from += channels)
            for (size_t l = 0; l < factor; l++, to += channels)
                for (size_t o = 0; o < channels; o += LANES) {
                    vec share = load(from + o, channels - o) / size;
                    if (a->add) share += load(to + o, channels - o);
                    store(to + o, share, channels - o);
                }
    }
    return 0;
}
