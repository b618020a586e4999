// A window's ring takes the last tokens of a step.
#include "attention_calls.h"
#include "parallel.h"

using namespace yo;

namespace {

constexpr int64_t SERIAL_BYTES = 65536;  // less is moved sooner than a second thread wakes up

}  // namespace

extern "C" {

// Token i of a sequence's `accepted` first ones of the step (all of them, if it is null) goes to place
// (start + i) % size of the sequence's ring; of more than `size` tokens the last ones.
void yo_commit_window(const Pool* pool, const Sequences* seqs, const Own* own,
                      const int64_t* accepted, int threads) {
    const int64_t element = pool->is_bf16 ? 2 : 4, *cu = own->cu_seqlens;
    const int64_t tokens = seqs->count ? cu[seqs->count] - cu[0] : 0;
    const int64_t k_bytes = pool->k_dim * element, v_bytes = pool->v_dim * element;
    if (tokens * pool->groups * (k_bytes + v_bytes) < SERIAL_BYTES) threads = 1;
    parallel_ranges(threads, seqs->count * pool->groups, [&](int64_t from, int64_t to) {
        for (int64_t item = from; item < to; ++item) {
            const int64_t seq = item / pool->groups, group = item % pool->groups;
            const int64_t all = cu[seq + 1] - cu[seq], kept = accepted ? accepted[seq] : all;
            const int64_t start = std::max<int64_t>(0, seqs->kv_lens[seq] - all);
            char* k = (char*)pool->k + seqs->slots[seq] * pool->k_block + group * pool->k_head;
            char* v = (char*)pool->v + seqs->slots[seq] * pool->v_block + group * pool->v_head;
            for (int64_t i = std::max<int64_t>(0, kept - pool->size); i < kept; ++i) {
                const int64_t token = cu[seq] + i, place = (start + i) % pool->size;
                std::memcpy(k + place * pool->k_row,
                            own->k + token * own->k_row + group * own->k_head, k_bytes);
                std::memcpy(v + place * pool->v_row,
                            own->v + token * own->v_row + group * own->v_head, v_bytes);
            }
        }
    });
}

}  // extern "C"
