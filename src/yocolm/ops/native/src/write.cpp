// Keys and values finished and written where they are kept: tokens in order, or pages.
#include "heads.h"
#include "packed.h"

using namespace yo;

namespace {

// Where a token goes: its page and offset in a pool, or, without pages, its row.
struct Places {
    const int64_t* page;
    const int64_t* offset;
    int64_t count, heads, page_size;

    // The place of a token's head in units of the head's size.
    int64_t at(int64_t token, int64_t head) const {
        if (!page) return token * heads + head;
        return (page[token] * heads + head) * page_size + offset[token];
    }
    // Whether this step's tokens, which are in order, fill the page that `token` begins.
    bool filled(int64_t token) const {
        int64_t last = token + page_size - 1;
        return last < count && page[last] == page[token] && offset[last] == page_size - 1;
    }
};

struct Source {
    const void* data;
    int64_t row, head, size;  // strides, and elements of a head
    const void* weight;
    void* out;
};

template <class T>
void clear_pages(const Source& s, const Places& places, int64_t token) {
    std::memset((T*)s.out + places.page[token] * places.heads * places.page_size * s.size, 0,
                places.heads * places.page_size * s.size * sizeof(T));
}

template <class T>
void write_token(const Source& s, const Finish& finish, const Places& places, int64_t token) {
    for (int64_t h = 0; h < places.heads; ++h)
        finish.head((const T*)s.data + token * s.row + h * s.head, (const T*)s.weight, token,
                    (T*)s.out + places.at(token, h) * s.size, s.size);
}

template <class T>
void write_heads(const Source& k, const Finish& k_finish, const Source& v, const Finish& v_finish,
                 const Places& places, int threads) {
    threads = threads_for(places.count * places.heads * (k.size + v.size), threads);
    if (places.page)  // all of it before anything is written: tokens of one page may be another thread's
        parallel_ranges(threads, places.count, [&](int64_t first, int64_t stop) {
            for (int64_t t = first; t < stop; ++t)
                if (places.offset[t] == 0 && !places.filled(t)) {
                    clear_pages<T>(k, places, t);
                    clear_pages<T>(v, places, t);
                }
        });
    parallel_ranges(threads, places.count, [&](int64_t first, int64_t stop) {
        for (int64_t t = first; t < stop; ++t) {
            write_token<T>(k, k_finish, places, t);
            write_token<T>(v, v_finish, places, t);
        }
    });
}

}  // namespace

extern "C" {

// Writes keys, normed (if norm_k, or k_weight) and turned, and values, normed if norm_v. Without
// page and offset, to k_out and v_out [count, heads, size]; else to pools [pages, heads, page_size,
// size], where pages that a token begins are cleared first.
void yo_write_heads(const void* k, int64_t k_row, int64_t k_head, int64_t k_size, const void* v,
                    int64_t v_row, int64_t v_head, int64_t v_size, const void* k_weight, int norm_v,
                    float eps, const void* cos, const void* sin, int64_t pairs, int interleaved,
                    void* k_out, void* v_out, const int64_t* page, const int64_t* offset,
                    int64_t count, int64_t heads, int64_t page_size, int is_bf16, int threads) {
    Finish k_finish{k_weight != nullptr, eps, (const float*)cos, (const float*)sin, pairs,
                    interleaved != 0};
    Finish v_finish{norm_v != 0, eps, nullptr, nullptr, 0, false};
    Source keys{k, k_row, k_head, k_size, k_weight, k_out};
    Source values{v, v_row, v_head, v_size, nullptr, v_out};
    Places places{page, offset, count, heads, page_size};
    if (is_bf16)
        write_heads<bf16>(keys, k_finish, values, v_finish, places, threads);
    else
        write_heads<float>(keys, k_finish, values, v_finish, places, threads);
}

// Page and offset of every token, from block_table [sequences, width] with rows `stride` apart.
void yo_page_places(const int64_t* block_table, int64_t stride, const int64_t* seq_ids,
                    const int64_t* positions, int64_t page_size, int64_t* page, int64_t* offset,
                    int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
        page[t] = block_table[seq_ids[t] * stride + positions[t] / page_size];
        offset[t] = positions[t] % page_size;
    }
}

}  // extern "C"

YO_PACKED(yo_write_heads)
YO_PACKED(yo_page_places)
