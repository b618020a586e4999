// What the two forms of gated retention share: where their inputs lie.
#pragma once
#include <cstdint>

namespace yo {

constexpr int64_t PART = 32;  // columns of a state that are worth an item of their own

// One of q, k, v [tokens, heads, size] with its strides in elements, the last being 1.
struct View {
    const void* data;
    int64_t token, head;
    template <class T>
    const T* row(int64_t t, int64_t h) const {
        return (const T*)data + t * token + h * head;
    }
};
struct Problem {
    View q, k, v, log_decay;
    int64_t heads, k_size, v_size;
    float scale;
};

}  // namespace yo
