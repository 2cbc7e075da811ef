// What the compiler calls for every access of a kernel (-fsanitize=thread), for misaligned pointers and
// array indices (-fsanitize=alignment,bounds), and memcpy and memset of a kernel library.
#include <string.h>

#include "runtime.h"

// ---- what -fsanitize=thread calls -------------------------------------------------------------------------------
#define HOOK(name, bytes, access, aligned) \
    extern "C" void name(void* p) { hook(p, bytes, access, aligned, __builtin_frame_address(0)); }
#define HOOKS(bytes)                                                  \
    HOOK(__tsan_read##bytes, bytes, kRead, true)                      \
    HOOK(__tsan_write##bytes, bytes, kWrite, true)                    \
    HOOK(__tsan_unaligned_read##bytes, bytes, kRead, false)           \
    HOOK(__tsan_unaligned_write##bytes, bytes, kWrite, false)         \
    HOOK(__tsan_volatile_read##bytes, bytes, kVolatile, true)         \
    HOOK(__tsan_volatile_write##bytes, bytes, kAtomicUpdate, true)    \
    HOOK(__tsan_unaligned_volatile_read##bytes, bytes, kVolatile, false) \
    HOOK(__tsan_unaligned_volatile_write##bytes, bytes, kAtomicUpdate, false)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, unsigned long bytes) {
    hook(p, static_cast<unsigned>(bytes), kRead, false, __builtin_frame_address(0));
}
extern "C" void __tsan_write_range(void* p, unsigned long bytes) {
    hook(p, static_cast<unsigned>(bytes), kWrite, false, __builtin_frame_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// ---- what -fsanitize=alignment,bounds calls; the structures are the compiler's ---------------------------------
struct Location {
    const char* file;
    uint32_t line, column;
};
struct TypeMismatch {
    Location location;
    void* type;
    unsigned char log_alignment, check_kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* address) {
    if (!g.current) return;
    g.fault->address = reinterpret_cast<uint64_t>(address);
    stop(kMisaligned, __builtin_frame_address(0), "access at an address that is not a multiple of %d",
         1 << data->log_alignment);
}
extern "C" void __ubsan_handle_out_of_bounds(void*, void* index) {
    if (!g.current) return;
    stop(kOutOfBounds, __builtin_frame_address(0), "index %lld outside of an array",
         static_cast<long long>(reinterpret_cast<intptr_t>(index)));
}

// memcpy and memset of the kernel library, by the linker's --wrap.
extern "C" void* __wrap_memcpy(void* to, const void* from, unsigned long bytes) {
    hook(from, static_cast<unsigned>(bytes), kRead, false, __builtin_frame_address(0));
    hook(to, static_cast<unsigned>(bytes), kWrite, false, __builtin_frame_address(0));
    return memcpy(to, from, bytes);
}
extern "C" void* __wrap_memset(void* to, int value, unsigned long bytes) {
    hook(to, static_cast<unsigned>(bytes), kWrite, false, __builtin_frame_address(0));
    return memset(to, value, bytes);
}
