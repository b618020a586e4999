// What callers describe: pools and batches, in 64-bit numbers; distances are in bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace yo {

struct Pool {
    const char *k, *v;
    int64_t k_block, k_head, k_row, v_block, v_head, v_row, size, groups, k_dim, v_dim, is_bf16;
};
struct Sequences {
    int64_t count;
    const int64_t *cu_seqlens, *positions, *kv_lens, *table;
    int64_t table_row, table_width;
    const int64_t* slots;
};
struct Own {  // a step's tokens, of which a window is part
    const char *k, *v;
    int64_t k_row, k_head, v_row, v_head;
    const int64_t* cu_seqlens;
};

}  // namespace yo
