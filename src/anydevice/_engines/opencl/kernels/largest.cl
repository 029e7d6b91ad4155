// Where the largest are. NaN is larger than everything; of equals the first counts.

bool is_nan(const NUMBER value)
{
#if FLOATING
    return isnan(value);
#else
    return false;
#endif
}

// Whether (a, at) comes before (b, also_at).
bool before(const NUMBER a, const INDEX at, const NUMBER b, const INDEX also_at)
{
    if (is_nan(a) || is_nan(b))
        return is_nan(a) && (!is_nan(b) || at < also_at);
    return a > b || (a == b && at < also_at);
}

// One work item for a result: any axis, by strides.
__kernel void argmax(const INDEX units,
                     const INDEX count,
                     const INDEX step,
                     __global const ELEMENT *x,
                     const INDEX start,
                     __global int *where KEPT_SIZES KEPT_STRIDES)
{
    const INDEX output = get_global_id(0);
    if (output >= units)
        return;
    KEPT_OFFSETS
    __global const ELEMENT *from = x + start + output_at_x;
    NUMBER best = LOAD(from, 0);
    INDEX at = 0;
    for (INDEX i = 1; i < count && !is_nan(best); i++) {
        const NUMBER value = LOAD(from, i * step);
        if (value > best || is_nan(value)) {
            best = value;
            at = i;
        }
    }
    where[output] = at;
}

// The best of the elements lane, lane + GROUP, … that come after the one taken last.
void best_of_stripe(__global const ELEMENT *row,
                    const INDEX count,
                    const int lane,
                    const NUMBER last,
                    const INDEX last_at,
                    NUMBER *best,
                    INDEX *best_at)
{
    *best_at = -1;
    for (INDEX i = lane; i < count; i += GROUP) {
        const NUMBER value = LOAD(row, i);
        if (last_at >= 0 && !before(last, last_at, value, i))
            continue;
        if (*best_at < 0 || before(value, i, *best, *best_at)) {
            *best = value;
            *best_at = i;
        }
    }
}

// Tournament selection: one group for a row. Each item keeps the best of its stripe, a tree
// reduction finds the winner, and only the winner's item searches its stripe again.
__kernel void top_k(const INDEX count,
                    const INDEX wanted,
                    __global const ELEMENT *x,
                    const INDEX start,
                    __global ELEMENT *values,
                    __global int *where)
{
    __local NUMBER best[GROUP];
    __local INDEX best_at[GROUP];
    __local int winner[GROUP];
    const INDEX row = get_group_id(0);
    const int lane = get_local_id(0);
    __global const ELEMENT *from = x + start + row * count;
    NUMBER mine = 0;
    INDEX mine_at;
    best_of_stripe(from, count, lane, 0, -1, &mine, &mine_at);
    for (INDEX taken = 0; taken < wanted; taken++) {
        best[lane] = mine;
        best_at[lane] = mine_at;
        winner[lane] = lane;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int step = 1; step < GROUP; step *= 2) {
            if (lane % (2 * step) == 0 && lane + step < GROUP) {
                const int one = winner[lane];
                const int two = winner[lane + step];
                if (best_at[one] < 0 || (best_at[two] >= 0 &&
                                         before(best[two], best_at[two], best[one], best_at[one])))
                    winner[lane] = two;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        const int taker = winner[0];
        const INDEX at = best_at[taker];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane == taker) {
#if KEEP_VALUES
            values[row * wanted + taken] = from[at];
#endif
            where[row * wanted + taken] = at;
            best_of_stripe(from, count, lane, mine, mine_at, &mine, &mine_at);
        }
    }
}
