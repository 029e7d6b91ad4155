// Quantized weights with codes of BITS bits and scales for each BLOCK columns: products of ROWS (a
// few) rows, for which codes are read once and as they are stored, and the numbers themselves.
//
// Products: one group of work items for a row of the weight, each item with blocks of its own, and
// a tree reduction in local memory. With SUPER, scales are int8 times a float16 of 256 columns.

#define PER_BYTE (8 / BITS)

#if SUPER
#define SCALE(values, factors, block)                                                              \
    ((float)(values)[block] * vload_half((block) / (256 / BLOCK), factors))
typedef char scale_element;
#elif WIDE_SCALES
#define SCALE(values, factors, block) ((values)[block])
typedef float scale_element;
#else
#define SCALE(values, factors, block) vload_half(block, values)
typedef half scale_element;
#endif

#define WEIGHT                                                                                     \
    __global const uchar *codes, const INDEX codes_start, __global const scale_element *scales,    \
        const INDEX scales_start, __global const half *super_scales, const INDEX supers_start,     \
        __global const scale_element *minimums, const INDEX minimums_start,                        \
        __global const half *super_minimums, const INDEX super_minimums_start

__kernel void multiply(const INDEX blocks,
                       const INDEX weight_rows,
                       __global const ELEMENT *x,
                       const INDEX x_start,
                       WEIGHT,
                       __global ELEMENT *product)
{
    __local float shared[ROWS * GROUP];
    const int lane = get_local_id(0);
    const INDEX row = get_group_id(0);
    float totals[ROWS];
    for (int r = 0; r < ROWS; r++)
        totals[r] = 0;
    for (INDEX block = lane; block < blocks; block += GROUP) {
        const INDEX at = row * blocks + block;
        __global const uchar *from = codes + codes_start + at * (BLOCK / PER_BYTE);
        __global const ELEMENT *x_from = x + x_start + block * BLOCK;
        float dots[ROWS], sums[ROWS];
        for (int r = 0; r < ROWS; r++)
            dots[r] = sums[r] = 0;
        for (int i = 0; i < BLOCK / PER_BYTE; i++) {
            const uint packed = from[i];
#pragma unroll
            for (int n = 0; n < PER_BYTE; n++) {
                const float code = (float)((packed >> (n * BITS)) & ((1 << BITS) - 1)) - ZERO;
                for (int r = 0; r < ROWS; r++) {
                    const float value = LOAD(x_from, (size_t)r * blocks * BLOCK + i * PER_BYTE + n);
                    dots[r] += value * code;
                    sums[r] += value;
                }
            }
        }
        const float scale = SCALE(scales + scales_start, super_scales + supers_start, at);
#if MINIMUMS
        const float least =
            SCALE(minimums + minimums_start, super_minimums + super_minimums_start, at);
#else
        const float least = 0;
#endif
        for (int r = 0; r < ROWS; r++)
            totals[r] += MINIMUMS ? scale * dots[r] + least * sums[r] : scale * dots[r];
    }
    for (int r = 0; r < ROWS; r++)
        shared[r * GROUP + lane] = totals[r];
#if GROUP > 1
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_of = GROUP / 2; half_of > 0; half_of /= 2) {
        if (lane < half_of)
            for (int r = 0; r < ROWS; r++)
                shared[r * GROUP + lane] += shared[r * GROUP + lane + half_of];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#endif
    if (lane == 0)
        for (int r = 0; r < ROWS; r++)
            STORE(product, (size_t)r * weight_rows + row, shared[r * GROUP]);
}

__kernel void dequantize(const INDEX bytes, WEIGHT, __global float *numbers)
{
    const INDEX item = get_global_id(0);
    if (item >= bytes)
        return;
    const INDEX at = item / (BLOCK / PER_BYTE);
    const uint packed = codes[codes_start + item];
    const float scale = SCALE(scales + scales_start, super_scales + supers_start, at);
    for (int n = 0; n < PER_BYTE; n++) {
        const float code = (float)((packed >> (n * BITS)) & ((1 << BITS) - 1)) - ZERO;
#if MINIMUMS
        numbers[(size_t)item * PER_BYTE + n] =
            scale * code +
            SCALE(minimums + minimums_start, super_minimums + super_minimums_start, at);
#else
        numbers[(size_t)item * PER_BYTE + n] = scale * code;
#endif
    }
}
