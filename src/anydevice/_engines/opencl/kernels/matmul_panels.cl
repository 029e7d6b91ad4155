// Products of matrices for CPUs, and for devices without groups of work items: packed panels and a
// register tile, as in GotoBLAS (Goto and van de Geijn 2008).
//
// `pack` copies a matrix into panels, so that what is multiplied together lies together: a panel is
// WIDTH rows of a (or columns of b), k after k, filled up with zeros. A work item of `matmul` takes
// RUN panels of a, one after the other, and computes PANEL_ROWS by 16 numbers in registers for each.

#define BLOCK 256

typedef JOIN(NUMBER, 8) eight;

__kernel void pack(const INDEX count,
                   const INDEX panels,
                   const INDEX across,
                   const INDEX inner,
                   __global const ELEMENT *x,
                   const INDEX start,
                   const INDEX x_across,
                   const INDEX x_k,
                   __global NUMBER *packed BATCH_SIZES BATCH_STRIDES)
{
    const size_t item = get_global_id(0);
    if (item >= (size_t)count)
        return;
    const INDEX k = item % inner;
    const INDEX panel = item / inner % panels;
    const INDEX batch = item / inner / panels;
    BATCH_OFFSETS
    __global const ELEMENT *from = x + start + batch_at_x;
    __global NUMBER *to = packed + item * WIDTH;
    for (int i = 0; i < WIDTH; i++) {
        const INDEX place = panel * WIDTH + i;
        to[i] = place < across ? (NUMBER)LOAD(from, (size_t)place * x_across + (size_t)k * x_k)
                               : (NUMBER)0;
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void matmul(const INDEX rows,
                                                                    const INDEX columns,
                                                                    const INDEX inner,
                                                                    __global const NUMBER *a,
                                                                    __global const NUMBER *b,
                                                                    __global ELEMENT *product)
{
    const INDEX down = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const INDEX runs = (down + RUN - 1) / RUN;
    const INDEX across = (columns + 15) / 16;
    const INDEX batch = get_global_id(0) / (runs * across);
    const INDEX place = get_global_id(0) % (runs * across);
    const INDEX panel = place / runs;
    const INDEX first = place % runs * RUN;
    const INDEX last = min(first + RUN, down);
    const int wide = min((INDEX)16, columns - panel * 16);
    a += ((size_t)batch * down + first) * inner * PANEL_ROWS;
    b += ((size_t)batch * across + panel) * inner * 16;
    eight sums[RUN][2 * PANEL_ROWS];
    for (int tile = 0; tile < RUN; tile++)
        for (int i = 0; i < 2 * PANEL_ROWS; i++)
            sums[tile][i] = (eight)(0);

    // So few k at a time that this part of b stays in the nearest cache for all panels of a.
    for (INDEX k0 = 0; k0 < inner; k0 += BLOCK) {
        const INDEX end = min(k0 + BLOCK, inner);
        for (int tile = 0; tile < last - first; tile++) {
            __global const NUMBER *from_a = a + ((size_t)tile * inner + k0) * PANEL_ROWS;
            __global const eight *from_b = (__global const eight *)(b + (size_t)k0 * 16);
            eight left[PANEL_ROWS];
            eight right[PANEL_ROWS];
#pragma unroll
            for (int i = 0; i < PANEL_ROWS; i++) {
                left[i] = sums[tile][2 * i];
                right[i] = sums[tile][2 * i + 1];
            }
            for (INDEX k = k0; k < end; k++) {
                const eight b_left = from_b[0];
                const eight b_right = from_b[1];
                from_b += 2;
#pragma unroll
                for (int i = 0; i < PANEL_ROWS; i++) {
                    const eight of_a = (eight)(from_a[i]);
                    left[i] += of_a * b_left;
                    right[i] += of_a * b_right;
                }
                from_a += PANEL_ROWS;
            }
#pragma unroll
            for (int i = 0; i < PANEL_ROWS; i++) {
                sums[tile][2 * i] = left[i];
                sums[tile][2 * i + 1] = right[i];
            }
        }
    }
    for (int i = 0; i < RUN * PANEL_ROWS; i++) {
        const INDEX row = first * PANEL_ROWS + i;
        const size_t at = ((size_t)batch * rows + row) * columns + panel * 16;
        const NUMBER *out = (const NUMBER *)&sums[i / PANEL_ROWS][i % PANEL_ROWS * 2];
        if (row < rows)
            for (int j = 0; j < wide; j++)
                STORE(product, at + j, out[j]);
    }
}
