// Products of matrices for GPUs by tiles in local memory and registers, double-buffered (Volkov and
// Demmel 2008): a group of work items computes TILE_ROWS × TILE_COLUMNS of the product.
//
// The group reads TILE_K columns of a and rows of b at a time into local memory, and each item
// multiplies ITEM_ROWS by ITEM_COLUMNS of them in registers, in pieces of four. While it does so,
// the next numbers are on their way from global memory. EDGES is 1 where the matrices are no
// multiples of the tiles. A_BY_K and B_BY_K say that neighbouring k are neighbours in memory: the
// items then read along k. BATCH_* walk through the matrices of a stack.

typedef JOIN(NUMBER, 4) four;

#define ITEMS_ACROSS (TILE_COLUMNS / ITEM_COLUMNS)
#define A_LOADS (TILE_ROWS * TILE_K / GROUP)
#define B_LOADS (TILE_COLUMNS * TILE_K / GROUP)
#define A_PITCH (TILE_ROWS / 4 + 1)
#define B_PITCH (TILE_COLUMNS / 4 + 1)
#define BAND 8

#if A_BY_K
#define A_K(e) ((e) % TILE_K)
#define A_ROW(e) ((e) / TILE_K)
#else
#define A_K(e) ((e) / TILE_ROWS)
#define A_ROW(e) ((e) % TILE_ROWS)
#endif
#if B_BY_K
#define B_K(e) ((e) % TILE_K)
#define B_COLUMN(e) ((e) / TILE_K)
#else
#define B_K(e) ((e) / TILE_COLUMNS)
#define B_COLUMN(e) ((e) % TILE_COLUMNS)
#endif

#if EDGES
#define IF_INSIDE(condition, value) ((condition) ? (NUMBER)(value) : (NUMBER)0)
#else
#define IF_INSIDE(condition, value) ((NUMBER)(value))
#endif

#define FETCH(k0)                                                                                  \
    _Pragma("unroll") for (int t = 0; t < A_LOADS; t++)                                            \
    {                                                                                              \
        const int e = lane + t * GROUP;                                                            \
        const INDEX k = (k0) + A_K(e);                                                             \
        next_a[t] = IF_INSIDE(row0 + A_ROW(e) < rows && k < inner,                                 \
                              LOAD(a, a_from + (size_t)A_ROW(e) * a_row + (size_t)k * a_k));       \
    }                                                                                              \
    _Pragma("unroll") for (int t = 0; t < B_LOADS; t++)                                            \
    {                                                                                              \
        const int e = lane + t * GROUP;                                                            \
        const INDEX k = (k0) + B_K(e);                                                             \
        next_b[t] = IF_INSIDE(column0 + B_COLUMN(e) < columns && k < inner,                        \
                              LOAD(b, b_from + (size_t)B_COLUMN(e) * b_column + (size_t)k * b_k)); \
    }

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void matmul(
    const INDEX rows,
    const INDEX columns,
    const INDEX inner,
    __global const ELEMENT *a,
    const INDEX a_start,
    const INDEX a_row,
    const INDEX a_k,
    __global const ELEMENT *b,
    const INDEX b_start,
    const INDEX b_column,
    const INDEX b_k,
    __global ELEMENT *product BATCH_SIZES BATCH_STRIDES)
{
    __local four a_tile[TILE_K * A_PITCH];
    __local four b_tile[TILE_K * B_PITCH];
    __local NUMBER *a_numbers = (__local NUMBER *)a_tile;
    __local NUMBER *b_numbers = (__local NUMBER *)b_tile;
    const int lane = get_local_id(0);
    const int across = lane % ITEMS_ACROSS;
    const int down = lane / ITEMS_ACROSS;

    // Groups that run at the same time share rows and columns: they go through bands of tiles.
    const INDEX tiles_down = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const INDEX tiles_across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const INDEX tiles = tiles_down * tiles_across;
    const INDEX batch = get_group_id(0) / tiles;
    const INDEX tile = get_group_id(0) % tiles;
    const INDEX band = tile / (BAND * tiles_across);
    const INDEX in_band = tile % (BAND * tiles_across);
    const INDEX height = min((INDEX)BAND, tiles_down - band * BAND);
    const INDEX row0 = (band * BAND + in_band % height) * TILE_ROWS;
    const INDEX column0 = in_band / height * TILE_COLUMNS;
    BATCH_OFFSETS
    const size_t a_from = a_start + batch_at_a + (size_t)row0 * a_row;
    const size_t b_from = b_start + batch_at_b + (size_t)column0 * b_column;

    four sums[ITEM_ROWS][ITEM_COLUMNS / 4];
#pragma unroll
    for (int i = 0; i < ITEM_ROWS; i++)
#pragma unroll
        for (int q = 0; q < ITEM_COLUMNS / 4; q++)
            sums[i][q] = (four)(0);

    NUMBER next_a[A_LOADS];
    NUMBER next_b[B_LOADS];
    FETCH(0)
    for (INDEX k0 = 0; k0 < inner; k0 += TILE_K) {
#pragma unroll
        for (int t = 0; t < A_LOADS; t++) {
            const int e = lane + t * GROUP;
            a_numbers[A_K(e) * A_PITCH * 4 + A_ROW(e)] = next_a[t];
        }
#pragma unroll
        for (int t = 0; t < B_LOADS; t++) {
            const int e = lane + t * GROUP;
            b_numbers[B_K(e) * B_PITCH * 4 + B_COLUMN(e)] = next_b[t];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (k0 + TILE_K < inner) {
            FETCH(k0 + TILE_K)
        }
#pragma unroll
        for (int k = 0; k < TILE_K; k++) {
            four from_b[ITEM_COLUMNS / 4];
#pragma unroll
            for (int q = 0; q < ITEM_COLUMNS / 4; q++)
                from_b[q] = b_tile[k * B_PITCH + q * ITEMS_ACROSS + across];
#pragma unroll
            for (int p = 0; p < ITEM_ROWS / 4; p++) {
                const four from_a = a_tile[k * A_PITCH + p * (TILE_ROWS / ITEM_ROWS) + down];
#pragma unroll
                for (int q = 0; q < ITEM_COLUMNS / 4; q++) {
                    sums[p * 4 + 0][q] += from_a.s0 * from_b[q];
                    sums[p * 4 + 1][q] += from_a.s1 * from_b[q];
                    sums[p * 4 + 2][q] += from_a.s2 * from_b[q];
                    sums[p * 4 + 3][q] += from_a.s3 * from_b[q];
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    const size_t to = (size_t)batch * rows * columns;
#pragma unroll
    for (int i = 0; i < ITEM_ROWS; i++) {
        const INDEX row = row0 + i / 4 * (TILE_ROWS / ITEM_ROWS * 4) + down * 4 + i % 4;
#pragma unroll
        for (int q = 0; q < ITEM_COLUMNS / 4; q++) {
            const INDEX column = column0 + q * (ITEMS_ACROSS * 4) + across * 4;
            const size_t at = to + (size_t)row * columns + column;
#if EDGES
            if (row >= rows)
                continue;
            if (column + 0 < columns)
                STORE(product, at + 0, sums[i][q].s0);
            if (column + 1 < columns)
                STORE(product, at + 1, sums[i][q].s1);
            if (column + 2 < columns)
                STORE(product, at + 2, sums[i][q].s2);
            if (column + 3 < columns)
                STORE(product, at + 3, sums[i][q].s3);
#else
            STORE(product, at + 0, sums[i][q].s0);
            STORE(product, at + 1, sums[i][q].s1);
            STORE(product, at + 2, sums[i][q].s2);
            STORE(product, at + 3, sums[i][q].s3);
#endif
        }
    }
}
