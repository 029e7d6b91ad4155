// Operations on each row of an array in C order: a group of work items for a row, tree reductions.
// Softmax of long rows is online (Milakov and Gimelshein 2018); layernorm takes two passes.
//
// A row is read in pieces of WIDTH numbers (1, 4 or 8). With ITEMS, each work item keeps its pieces
// in registers, and the row is read from memory once; without, it is read anew for each pass.

#if WIDTH == 1
typedef NUMBER piece_of_row;
#define LOAD_PIECE(p, i) LOAD(p, i)
#define STORE_PIECE(p, i, value) STORE(p, i, value)
#define SUM_OF(v) (v)
#define MAX_OF(v) (v)
#else
typedef JOIN(NUMBER, WIDTH) piece_of_row;
#define LOAD_PIECE(p, i) JOIN(JOIN(load, WIDTH), JOIN(_, NAME))(p, (size_t)(i) * WIDTH)
#define STORE_PIECE(p, i, value) JOIN(JOIN(store, WIDTH), JOIN(_, NAME))(p, (size_t)(i) * WIDTH, value)
#if WIDTH == 8
#define SUM_OF(v) sum_of_four((v).lo + (v).hi)
#define MAX_OF(v) max_of_four(fmax((v).lo, (v).hi))
#else
#define SUM_OF(v) sum_of_four(v)
#define MAX_OF(v) max_of_four(v)
#endif

NUMBER sum_of_four(const JOIN(NUMBER, 4) v)
{
    return (v.s0 + v.s1) + (v.s2 + v.s3);
}

NUMBER max_of_four(const JOIN(NUMBER, 4) v)
{
    return fmax(fmax(v.s0, v.s1), fmax(v.s2, v.s3));
}
#endif

#if ITEMS
#define FOR_EACH_PIECE                                                                             \
    _Pragma("unroll") for (int t = 0, piece = lane; t < ITEMS; t++, piece += GROUP)                \
        if (piece < pieces)
#define PIECE kept[t]
#define READ_ROW                                                                                   \
    piece_of_row kept[ITEMS];                                                                      \
    FOR_EACH_PIECE kept[t] = LOAD_PIECE(from, piece);
#else
#define FOR_EACH_PIECE for (int piece = lane; piece < pieces; piece += GROUP)
#define PIECE LOAD_PIECE(from, piece)
#define READ_ROW
#endif

#if GROUP > 1
#define SHARED __local NUMBER shared[GROUP];

// Each round makes one number of up to eight, so that a large group waits only a few times.
#define JOINED(name, WITH)                                                                         \
    NUMBER name(const NUMBER mine, __local NUMBER *shared, const int lane)                         \
    {                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                              \
        shared[lane] = mine;                                                                       \
        barrier(CLK_LOCAL_MEM_FENCE);                                                              \
        for (int left = GROUP; left > 1;) {                                                        \
            const int next = max(left / 8, 1);                                                     \
            if (lane < next)                                                                       \
                for (int other = lane + next; other < left; other += next)                         \
                    shared[lane] = WITH(shared[lane], shared[other]);                              \
            left = next;                                                                           \
            barrier(CLK_LOCAL_MEM_FENCE);                                                          \
        }                                                                                          \
        return shared[0];                                                                          \
    }
#define PLUS(a, b) ((a) + (b))
JOINED(joined_sum, PLUS)
JOINED(joined_max, fmax)
#else
#define SHARED
#define joined_sum(mine, shared, lane) (mine)
#define joined_max(mine, shared, lane) (mine)
#endif

// Said ahead, a compiler makes room for groups that are larger than it would take unasked.
#define OF_A_GROUP __kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))

#define ROW                                                                                        \
    SHARED                                                                                         \
    const int lane = get_local_id(0);                                                              \
    const int pieces = columns / WIDTH;                                                            \
    __global const ELEMENT *from = x + start + get_group_id(0) * (size_t)columns;                  \
    __global ELEMENT *to = result + get_group_id(0) * (size_t)columns;                             \
    READ_ROW

OF_A_GROUP void softmax(
    const int columns,
    __global const ELEMENT *x,
    const long start,
    __global ELEMENT *result)
{
    ROW
#if ITEMS
    piece_of_row most = (piece_of_row)(-INFINITY);
    FOR_EACH_PIECE most = fmax(most, PIECE);
    const NUMBER largest = joined_max(MAX_OF(most), shared, lane);
    piece_of_row sum = (piece_of_row)(0);
    FOR_EACH_PIECE
    {
        kept[t] = exp(kept[t] - largest);
        sum += kept[t];
    }
    const NUMBER total = joined_sum(SUM_OF(sum), shared, lane);
    const NUMBER factor = 1 / total;
    FOR_EACH_PIECE STORE_PIECE(to, piece, kept[t] * factor);
#else
    // The largest so far and the sum that goes with it, so that the row is read twice, not thrice.
    NUMBER mine = -INFINITY;
    NUMBER sum = 0;
    FOR_EACH_PIECE
    {
        const piece_of_row value = PIECE;
        const NUMBER top = MAX_OF(value);
        if (top > mine) {
            sum = mine == -INFINITY ? sum : sum * exp(mine - top);
            mine = top;
        }
        // Before any number, minus infinities add nothing; NaN stays NaN.
        sum += mine == -INFINITY ? (SUM_OF(value) == -INFINITY ? (NUMBER)0 : (NUMBER)NAN)
                                 : SUM_OF(exp(value - mine));
    }
    const NUMBER largest = joined_max(mine, shared, lane);
    // An item whose pieces were all minus infinity, or that had none, has a sum of 0 or NAN.
    const NUMBER share = mine == -INFINITY && largest != -INFINITY ? sum : sum * exp(mine - largest);
    const NUMBER total = joined_sum(share, shared, lane);
    const NUMBER factor = 1 / total;
    FOR_EACH_PIECE STORE_PIECE(to, piece, exp(PIECE - largest) * factor);
#endif
}

OF_A_GROUP void rmsnorm(
    const int columns,
    __global const ELEMENT *x,
    const long start,
    __global ELEMENT *result,
    __global const ELEMENT *weight,
    const long weight_start,
    const NUMBER eps)
{
    ROW
    weight += weight_start;
    piece_of_row squares = (piece_of_row)(0);
    FOR_EACH_PIECE
    {
        const piece_of_row value = PIECE;
        squares += value * value;
    }
    const NUMBER mean = joined_sum(SUM_OF(squares), shared, lane) / columns;
    const NUMBER scale = 1 / sqrt(mean + eps);
    FOR_EACH_PIECE STORE_PIECE(to, piece, PIECE * scale * LOAD_PIECE(weight, piece));
}

OF_A_GROUP void layernorm(
    const int columns,
    __global const ELEMENT *x,
    const long start,
    __global ELEMENT *result,
    __global const ELEMENT *weight,
    const long weight_start,
    __global const ELEMENT *bias,
    const long bias_start,
    const NUMBER eps)
{
    ROW
    weight += weight_start;
    bias += bias_start;
    piece_of_row sum = (piece_of_row)(0);
    FOR_EACH_PIECE sum += PIECE;
    const NUMBER mean = joined_sum(SUM_OF(sum), shared, lane) / columns;
    piece_of_row squares = (piece_of_row)(0);
    FOR_EACH_PIECE
    {
        const piece_of_row away = PIECE - mean;
        squares += away * away;
    }
    const NUMBER variance = joined_sum(SUM_OF(squares), shared, lane) / columns;
    const NUMBER scale = 1 / sqrt(variance + eps);
    FOR_EACH_PIECE
    {
        piece_of_row value = (PIECE - mean) * scale;
        if (HAS_WEIGHT)
            value *= LOAD_PIECE(weight, piece);
        if (HAS_BIAS)
            value += LOAD_PIECE(bias, piece);
        STORE_PIECE(to, piece, value);
    }
}
