// A stable merge sort of rows; NaN is larger than everything. Insertion sort makes runs, and each
// element finds its rank in the other run by binary search (Satish et al. 2009).

bool is_nan(const NUMBER value)
{
#if FLOATING
    return isnan(value);
#else
    return false;
#endif
}

// Whether a comes after b.
bool after(const NUMBER a, const NUMBER b)
{
#if DESCENDING
    return !is_nan(a) && (is_nan(b) || a < b);
#else
    return !is_nan(b) && (is_nan(a) || a > b);
#endif
}

// One work item sorts a run of a row, by insertion.
__kernel void sort_runs(const INDEX units,
                        const INDEX count,
                        const INDEX runs,
                        const INDEX width,
                        __global const ELEMENT *x,
                        const INDEX start,
                        __global ELEMENT *values,
                        __global int *where)
{
    const INDEX unit = get_global_id(0);
    if (unit >= units)
        return;
    const INDEX row = (unit / runs) * count;
    const INDEX first = (unit % runs) * width;
    const INDEX stop = min(first + width, count);
    for (INDEX i = first; i < stop; i++) {
        const NUMBER value = LOAD(x, start + row + i);
        INDEX to = i;
        for (; to > first && after(LOAD(values, row + to - 1), value); to--) {
            values[row + to] = values[row + to - 1];
            where[row + to] = where[row + to - 1];
        }
        values[row + to] = x[start + row + i];
        where[row + to] = i;
    }
}

// Merges two runs. An element's place is its index in its own run plus its rank in the other; of
// equal elements, those of the first run come first.
__kernel void merge_runs(const INDEX units,
                         const INDEX count,
                         const INDEX width,
                         __global const ELEMENT *values,
                         __global const int *where,
                         __global ELEMENT *to_values,
                         __global int *to_where)
{
    const INDEX unit = get_global_id(0);
    if (unit >= units)
        return;
    const INDEX row = (unit / count) * count;
    const INDEX i = unit % count;
    const INDEX run = i / width;
    const bool second = run & 1;
    const INDEX other = min((second ? run - 1 : run + 1) * width, count);
    const NUMBER value = LOAD(values, unit);
    INDEX low = other;
    INDEX high = min(other + width, count);
    while (low < high) {
        const INDEX middle = low + (high - low) / 2;
        const NUMBER there = LOAD(values, row + middle);
        if (second ? !after(there, value) : after(value, there))
            low = middle + 1;
        else
            high = middle;
    }
    const INDEX to = unit + low - other - (second ? width : 0);
    to_values[to] = values[unit];
    to_where[to] = where[unit];
}
