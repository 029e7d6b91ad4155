// Flash attention (Dao et al. 2022) of many queries on GPUs: a group of SIZE work items for
// QUERY_TILE queries of a head.
//
// It goes through the keys in tiles of KEY_TILE. An item computes a few scores of a tile, and keeps
// 4 × 8 numbers of the result in registers. The text of attention.cl comes before this.

#define QUERY_TILE 32
#define KEY_TILE 32
#define ROWS_EACH (QUERY_TILE * 8 / GROUP)
#define PITCH (SIZE + 1)

__kernel void attention_by_tile(ARGUMENTS)
{
    __local NUMBER q_tile[QUERY_TILE * PITCH];
    __local NUMBER kv_tile[KEY_TILE * PITCH];
    __local NUMBER scores[QUERY_TILE * (KEY_TILE + 1)];
    __local NUMBER largest[QUERY_TILE];
    __local NUMBER totals[QUERY_TILE];
    __local NUMBER downs[QUERY_TILE];
    const int lane = get_local_id(0);
    const INDEX tiles = (queries + QUERY_TILE - 1) / QUERY_TILE;
    // The last queries see the most keys: they begin first.
    const INDEX query0 = (tiles - 1 - get_group_id(0) % tiles) * QUERY_TILE;
    const INDEX head = get_group_id(0) / tiles % heads;
    const INDEX batch = get_group_id(0) / tiles / heads;
    __global const ELEMENT *q_from = q + q_start + batch * q_batch + head * q_head;
    __global const ELEMENT *k_from = k + k_start + batch * k_batch + head / REPEAT * k_head;
    __global const ELEMENT *v_from = v + v_start + batch * v_batch + head / REPEAT * v_head;
    const INDEX valid = VALID(batch);
    const int here = (int)min((INDEX)QUERY_TILE, queries - query0);
    const INDEX low = seen_range(query0, queries, valid, window).low;
    const INDEX high = seen_range(query0 + here - 1, queries, valid, window).high;

    for (int row = 0; row < QUERY_TILE; row++)
        q_tile[row * PITCH + lane] =
            row < here ? (NUMBER)LOAD(q_from, (size_t)(query0 + row) * q_row + lane) * scale
                       : (NUMBER)0;
    if (lane < QUERY_TILE) {
        largest[lane] = NOTHING;
        totals[lane] = 0;
    }
    const int score_column = lane % 8;
    const int score_row = lane / 8 * ROWS_EACH;
    const int sum_column = lane % (SIZE / 8);
    const int sum_row = lane / (SIZE / 8) * 4;
    NUMBER sums[4][8];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            sums[i][j] = 0;

    for (INDEX key0 = low; key0 < high; key0 += KEY_TILE) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int row = 0; row < KEY_TILE; row++)
            kv_tile[row * PITCH + lane] =
                key0 + row < high ? (NUMBER)LOAD(k_from, (size_t)(key0 + row) * k_row + lane)
                                  : (NUMBER)0;
        barrier(CLK_LOCAL_MEM_FENCE);
        NUMBER dots[ROWS_EACH][4];
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                dots[i][j] = 0;
        for (int d = 0; d < SIZE; d++) {
            NUMBER from_k[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                from_k[j] = kv_tile[(score_column + 8 * j) * PITCH + d];
#pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                const NUMBER from_q = q_tile[(score_row + i) * PITCH + d];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    dots[i][j] += from_q * from_k[j];
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                scores[(score_row + i) * (KEY_TILE + 1) + score_column + 8 * j] = dots[i][j];
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll 1
        for (int row = lane / KEY_TILE; row < QUERY_TILE; row += GROUP / KEY_TILE) {
            const INDEX query = min(query0 + row, queries - 1);
            const INDEX key = key0 + lane % KEY_TILE;
            const range seen = seen_range(query, queries, valid, window);
            const size_t mask_row = MASK_ROW(batch, head, query);
            if (key < seen.low || key >= seen.high || MASKED(mask_row, key))
                scores[row * (KEY_TILE + 1) + lane % KEY_TILE] = NOTHING;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int row = 0; row < KEY_TILE; row++)
            kv_tile[row * PITCH + lane] =
                key0 + row < high ? (NUMBER)LOAD(v_from, (size_t)(key0 + row) * v_row + lane)
                                  : (NUMBER)0;
        if (lane < QUERY_TILE) {
            const int row = lane;
            __local NUMBER *own = scores + row * (KEY_TILE + 1);
            NUMBER most = largest[row];
#pragma unroll 1
            for (int j = 0; j < KEY_TILE; j++)
                most = fmax(most, own[j]);
            const NUMBER base = most == NOTHING ? (NUMBER)0 : most;
            downs[row] = exp(largest[row] - base);
            NUMBER total = totals[row] * downs[row];
#pragma unroll 1
            for (int j = 0; j < KEY_TILE; j++) {
                own[j] = own[j] == NOTHING ? (NUMBER)0 : exp(own[j] - base);
                total += own[j];
            }
            largest[row] = most;
            totals[row] = total;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                sums[i][j] *= downs[sum_row + i];
        for (int key = 0; key < KEY_TILE; key++) {
            NUMBER from_v[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                from_v[j] = kv_tile[key * PITCH + sum_column + j * (SIZE / 8)];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const NUMBER share = scores[(sum_row + i) * (KEY_TILE + 1) + key];
                // A key that no query may see can hold anything, also NaN.
                if (share != 0)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        sums[i][j] += share * from_v[j];
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = sum_row + i;
        if (row < here) {
            const NUMBER inverse = totals[row] == 0 ? (NUMBER)0 : 1 / totals[row];
            const size_t at = (((size_t)batch * heads + head) * queries + query0 + row) * SIZE;
#pragma unroll
            for (int j = 0; j < 8; j++)
                STORE(result, at + sum_column + j * (SIZE / 8), sums[i][j] * inverse);
        }
    }
}
