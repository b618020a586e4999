// Calls with all arguments in one block of 8-byte slots: ctypes takes 0.1 us for each argument.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace yo {

template <class A>
inline A from_slot(const void* slot) {
    if constexpr (std::is_pointer<A>::value) {
        A pointer;
        std::memcpy(&pointer, slot, sizeof(pointer));
        return pointer;
    } else if constexpr (std::is_floating_point<A>::value) {
        double number;
        std::memcpy(&number, slot, 8);
        return (A)number;
    } else {
        int64_t number;
        std::memcpy(&number, slot, 8);
        return (A)number;
    }
}

template <class... A, size_t... I>
inline void call_packed(void (*f)(A...), const char* slots, std::index_sequence<I...>) {
    f(from_slot<A>(slots + 8 * I)...);
}
template <class... A>
inline void call_packed(void (*f)(A...), const char* slots) {
    call_packed(f, slots, std::index_sequence_for<A...>{});
}

}  // namespace yo

// Defines `name`_packed for the function `name`: pointers, int64 and double, in its arguments' order.
#define YO_PACKED(name) \
    extern "C" void name##_packed(const char* slots) { yo::call_packed(name, slots); }
