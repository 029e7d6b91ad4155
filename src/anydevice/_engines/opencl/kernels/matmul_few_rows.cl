// Products of ROWS (a few) rows with a matrix, which is read once: all time goes into reading it.
//
// Matrix-vector products with tree reductions in local memory. `along_k` is for matrices whose k
// are neighbours in memory (weights kept as out × in): a group of work items computes one column.
// `along_columns` is for those whose columns are neighbours: an item computes a column, and several
// items of a group share its k. a is in C order. ALIGNED says that all rows of both begin at a
// multiple of eight numbers, so that eight can be read at once.

#define ACROSS (GROUP < MOST_ACROSS ? GROUP : MOST_ACROSS)

#if ALIGNED
#define LOAD_EIGHT(p, k) JOIN(load8, JOIN(_, NAME))(p, k)
#else
#define LOAD_EIGHT(p, k)                                                                           \
    (JOIN(NUMBER, 8))(LOAD(p, (k) + 0), LOAD(p, (k) + 1), LOAD(p, (k) + 2), LOAD(p, (k) + 3),      \
                      LOAD(p, (k) + 4), LOAD(p, (k) + 5), LOAD(p, (k) + 6), LOAD(p, (k) + 7))
#endif

__kernel void along_k(const INDEX columns,
                      const INDEX inner,
                      __global const ELEMENT *a,
                      const INDEX a_start,
                      const INDEX a_row,
                      __global const ELEMENT *b,
                      const INDEX b_start,
                      const INDEX b_column,
                      __global ELEMENT *product BATCH_SIZES BATCH_STRIDES)
{
    __local NUMBER shared[ROWS * GROUP];
    const int lane = get_local_id(0);
    const INDEX unit = get_group_id(0);
    const INDEX batch = unit / columns;
    const INDEX column = unit % columns;
    BATCH_OFFSETS
    __global const ELEMENT *a_from = a + a_start + batch_at_a;
    __global const ELEMENT *b_from = b + b_start + batch_at_b + (size_t)column * b_column;
    JOIN(NUMBER, 8) sums[ROWS];
    for (int i = 0; i < ROWS; i++)
        sums[i] = (JOIN(NUMBER, 8))(0);
    INDEX k = lane * 8;
    for (; k + 7 < inner; k += GROUP * 8) {
        const JOIN(NUMBER, 8) from_b = LOAD_EIGHT(b_from, k);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            sums[i] += LOAD_EIGHT(a_from, (size_t)i * a_row + k) * from_b;
    }
    for (; k < inner; k++)
        for (int i = 0; i < ROWS; i++)
            sums[i].s0 += (NUMBER)LOAD(a_from, (size_t)i * a_row + k) * (NUMBER)LOAD(b_from, k);
    for (int i = 0; i < ROWS; i++) {
        const JOIN(NUMBER, 4) four = sums[i].lo + sums[i].hi;
        shared[i * GROUP + lane] = four.s0 + four.s1 + four.s2 + four.s3;
    }
#if GROUP > 1
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_of = GROUP / 2; half_of > 0; half_of /= 2) {
        if (lane < half_of)
            for (int i = 0; i < ROWS; i++)
                shared[i * GROUP + lane] += shared[i * GROUP + lane + half_of];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#endif
    if (lane == 0)
        for (int i = 0; i < ROWS; i++)
            STORE(product, ((size_t)batch * ROWS + i) * columns + column, shared[i * GROUP]);
}

__kernel void along_columns(const INDEX columns,
                            const INDEX inner,
                            __global const ELEMENT *a,
                            const INDEX a_start,
                            const INDEX a_row,
                            __global const ELEMENT *b,
                            const INDEX b_start,
                            const INDEX b_k,
                            __global ELEMENT *product BATCH_SIZES BATCH_STRIDES)
{
    __local NUMBER shared[ROWS * GROUP];
    const int lane = get_local_id(0);
    const int slice = lane / ACROSS;
    const INDEX unit = get_group_id(0);
    const INDEX chunks = (columns + ACROSS - 1) / ACROSS;
    const INDEX batch = unit / chunks;
    const INDEX column = unit % chunks * ACROSS + lane % ACROSS;
    BATCH_OFFSETS
    __global const ELEMENT *a_from = a + a_start + batch_at_a;
    __global const ELEMENT *b_from = b + b_start + batch_at_b + column;
    NUMBER sums[ROWS];
    for (int i = 0; i < ROWS; i++)
        sums[i] = 0;
    if (column < columns)
        for (INDEX k = slice; k < inner; k += GROUP / ACROSS) {
            const NUMBER from_b = LOAD(b_from, (size_t)k * b_k);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                sums[i] += (NUMBER)LOAD(a_from, (size_t)i * a_row + k) * from_b;
        }
#if GROUP > MOST_ACROSS
    for (int i = 0; i < ROWS; i++)
        shared[i * GROUP + lane] = sums[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    if (slice == 0)
        for (int i = 0; i < ROWS; i++)
            for (int other = 1; other < GROUP / ACROSS; other++)
                sums[i] += shared[i * GROUP + other * ACROSS + lane];
#endif
    if (slice == 0 && column < columns)
        for (int i = 0; i < ROWS; i++)
            STORE(product, ((size_t)batch * ROWS + i) * columns + column, sums[i]);
}
