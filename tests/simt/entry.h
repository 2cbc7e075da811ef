// What device.py calls in a kernel library: `simt_parameters`, one letter and size per parameter, and
// `simt_run`, which one thread of a launch runs.
#pragma once

struct SimtParameter {
    char kind;      // p pointer, i int, f float, s structure
    char pointee;   // of a pointer: f float, h half, b bfloat16, i 32-bit integer, ? anything
    int bytes;
};

template <typename T>
struct SimtPointee {
    static constexpr char kind = '?';
};
template <typename T>
struct SimtPointee<const T> : SimtPointee<T> {};
template <>
struct SimtPointee<float> {
    static constexpr char kind = 'f';
};
template <>
struct SimtPointee<__half> {
    static constexpr char kind = 'h';
};
template <>
struct SimtPointee<__nv_bfloat16> {
    static constexpr char kind = 'b';
};
template <>
struct SimtPointee<int> {
    static constexpr char kind = 'i';
};
template <>
struct SimtPointee<unsigned> {
    static constexpr char kind = 'i';
};

template <typename T>
struct SimtKind {
    static constexpr SimtParameter value{'s', '?', sizeof(T)};
};
template <typename T>
struct SimtKind<T*> {
    static constexpr SimtParameter value{'p', SimtPointee<T>::kind, 8};
};
template <>
struct SimtKind<int> {
    static constexpr SimtParameter value{'i', '?', 4};
};
template <>
struct SimtKind<float> {
    static constexpr SimtParameter value{'f', '?', 4};
};

template <int... I>
struct SimtIndices {};
template <int N, int... I>
struct SimtCount : SimtCount<N - 1, N - 1, I...> {};
template <int... I>
struct SimtCount<0, I...> {
    using type = SimtIndices<I...>;
};

template <typename F>
struct SimtEntry;
template <typename... A>
struct SimtEntry<void (*)(A...)> {
    static constexpr SimtParameter parameters[sizeof...(A) + 1] = {SimtKind<A>::value..., {0, 0, 0}};
    template <int... I>
    SIMT_UNCHECKED static void call(void (*kernel)(A...), void* const* arguments, SimtIndices<I...>) {
        kernel(*static_cast<A*>(arguments[I])...);
    }
    using Indices = typename SimtCount<sizeof...(A)>::type;
};

#define SIMT_EXPORT __attribute__((visibility("default")))
#define SIMT_ENTRY(...)                                                                         \
    using SimtThis = SimtEntry<decltype(&__VA_ARGS__)>;                                         \
    extern "C" SIMT_EXPORT const SimtParameter* simt_parameters() { return SimtThis::parameters; } \
    extern "C" SIMT_EXPORT SIMT_UNCHECKED void simt_run(void* const* arguments) {               \
        SimtThis::call(&__VA_ARGS__, arguments, SimtThis::Indices());                           \
    }                                                                                           \
    /* Touching the thread-local segment makes the loader allocate it for the calling thread. */ \
    extern "C" SIMT_EXPORT void* simt_touch_shared() {                                          \
        static thread_local char first;                                                         \
        return &first;                                                                          \
    }
