// What the threads of a kernel touch. The .cu files are compiled with -fsanitize=thread, whose calls before every
// access are defined here instead of in its library: each access must lie inside shared memory, a live allocation of
// this GPU, the thread's own stack or the program's constants, and be aligned. With EMULATE_RACES=1, two threads must
// not touch the same bytes, one of them writing, unless a barrier lies between or both use atomic operations.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "internal.h"

extern "C" char __executable_start, _end;  // of the program, from the linker

namespace emulate {

namespace {

// ---- shared memory: what is declared lies between red zones ----
constexpr size_t kRedZone = 32;
enum Inside : uint8_t { nothing, declared, awaited };  // awaited: by who copies there (cp.async)
Inside inside[kSharedArena + 16];                      // of each byte
size_t shared_end = 0, static_bytes = 0, dynamic_bytes = 0, block_limit = 0;

size_t declare(size_t bytes, size_t alignment) {
    // Aligned to `alignment` and no better: an access that is wider than the declared type shows.
    size_t begin = (shared_end + kRedZone + 2 * alignment - 1) / (2 * alignment) * (2 * alignment) + alignment;
    if (begin + bytes + kRedZone > kSharedArena) fault("more shared memory than any GPU has for a block");
    std::memset(inside + begin, declared, bytes);
#if EMULATE_ASAN
    __asan_unpoison_memory_region(shared_memory + begin, bytes);
#endif
    std::memset(shared_memory + begin, 0xff, bytes);  // NaN
    shared_end = begin + bytes;
    return begin;
}

// ---- races ----
const bool kRaces = setting("EMULATE_RACES", "0") == "1";

struct Access {
    uint32_t code = 0;  // offset in the program
    uint32_t serial = 0;
    uint16_t thread = 0, barriers = 0, warp_barriers = 0;
    uint8_t bytes = 0;  // which of the word's four
    Kind kind = Kind::read;
};
struct Word {
    Access last[4];
};
Word* words_of(size_t bytes) { return reinterpret_cast<Word*>(reserve(bytes * (sizeof(Word) / 4))); }
Word* const shared_words = kRaces ? words_of(kSharedArena) : nullptr;
Word* const global_words = kRaces ? words_of(kArena) : nullptr;

uint32_t offset_of(const void* code) { return uint32_t(static_cast<const char*>(code) - &__executable_start); }
const void* code_at(uint32_t offset) { return &__executable_start + offset; }

// What addr2line prints about an address: line 0 the function, line 1 file:line.
std::string lookup(const void* code, int line) {
    char program[4096] = {}, command[4300], text[2][4000] = {};
    if (readlink("/proc/self/exe", program, sizeof program - 1) <= 0) return "?";
    const auto start = reinterpret_cast<uintptr_t>(&__executable_start);
    const bool moved = start > uintptr_t(1) << 32;  // a position-independent program, whose addresses begin at 0
    const auto address = reinterpret_cast<uintptr_t>(code) - (moved ? start : 0);
    std::snprintf(command, sizeof command, "addr2line -Cf -e '%s' 0x%zx", program, address);
    if (FILE* pipe = popen(command, "r")) {
        for (auto& each : text)
            if (!std::fgets(each, sizeof each, pipe)) each[0] = 0;
        pclose(pipe);
    }
    const std::string answer = text[line];
    return answer.substr(0, answer.find_last_not_of("\n") + 1);
}

const char* verb(Kind kind) {
    return kind == Kind::read ? "reads" : kind == Kind::write ? "writes" : "changes atomically";
}

// Whether a's thread was past what b's thread does, or the other way round. Blocks of one launch are not ordered; their
// shared memories are not the same.
inline bool ordered(const Access& a, const Access& b, bool shared) {
    if (a.serial != b.serial) return shared || a.serial < uint32_t(now.first_serial);
    if (a.thread == b.thread || a.barriers != b.barriers) return true;
    return a.thread / 32 == b.thread / 32 && a.warp_barriers != b.warp_barriers;
}

[[noreturn]] void report_race(const Access& before, const Access& mine, bool shared) {
    fault(std::string("race in ") + (shared ? "shared" : "global") + " memory, no barrier between: thread " +
          std::to_string(mine.thread) + " " + verb(mine.kind) + " in " + line_of(code_at(mine.code)) + ", thread " +
          std::to_string(before.thread) + (before.serial == mine.serial ? "" : " of another block") + " " +
          verb(before.kind) + " in " + line_of(code_at(before.code)));
}

// The newest access of a word comes first.
inline void check_race(Word& word, const Access& mine, bool shared) {
    const Access& newest = word.last[0];
    if (shared ? newest.serial != mine.serial || newest.barriers != mine.barriers
               : newest.serial < uint32_t(now.first_serial)) {  // all of them are ordered before this one
        word = {{mine, {}, {}, {}}};
        return;
    }
    if (newest.serial == mine.serial && newest.thread == mine.thread && newest.kind == mine.kind &&
        newest.barriers == mine.barriers && newest.warp_barriers == mine.warp_barriers &&
        (newest.bytes & mine.bytes) == mine.bytes)
        return;  // once more the same, and nothing since
    for (const Access& before : word.last) {
        const bool conflict = (before.bytes & mine.bytes) && (before.kind != Kind::read || mine.kind != Kind::read) &&
                              !(before.kind == Kind::atomic && mine.kind == Kind::atomic);
        if (conflict && !ordered(before, mine, shared)) report_race(before, mine, shared);
    }
    // Kept in the place of this thread's last access of the kind; of one that cannot conflict any more; or of any.
    Access* place = &word.last[mine.thread % 4];
    uint8_t bytes = mine.bytes;
    for (Access& before : word.last) {
        const bool mine_too = before.thread == mine.thread && before.serial == mine.serial;
        if (mine_too && before.kind == mine.kind) {
            if (before.barriers == mine.barriers && before.warp_barriers == mine.warp_barriers) bytes |= before.bytes;
            place = &before;
            break;
        }
        if (!mine_too && ordered(before, mine, shared)) place = &before;
    }
    *place = word.last[0];
    word.last[0] = mine;
    word.last[0].bytes = bytes;
}

inline void check_races(Word* words, size_t offset, size_t bytes, Kind kind, const void* code, bool shared) {
    Access mine{offset_of(code), uint32_t(block_serial), now.thread, now.barriers, now.warp_barriers, 0, kind};
    for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
        const size_t begin = std::max(offset, 4 * word) - 4 * word,
                     end = std::min(offset + bytes, 4 * word + 4) - 4 * word;
        mine.bytes = uint8_t((1u << end) - (1u << begin));
        check_race(words[word], mine, shared);
    }
}

}  // namespace

std::string line_of(const void* code) {  // where the call before this address is
    const std::string line = lookup(static_cast<const char*>(code) - 1, 1);
    return line.substr(line.starts_with("./") ? 2 : 0, line.find(' ') - (line.starts_with("./") ? 2 : 0));
}

std::string name_of(const void* kernel) {
    std::string name = lookup(kernel, 0);
    for (const std::string& scope : {std::string("train70b::cuda::"), std::string("(anonymous namespace)::")})
        for (size_t at = name.find(scope); at != std::string::npos; at = name.find(scope)) name.erase(at, scope.size());
    name = name.substr(0, name.rfind('('));
    return name.starts_with("void ") ? name.substr(5) : name;
}

char* const shared_memory = [] {
    char* const p = reserve(kSharedArena);
#if EMULATE_ASAN
    __asan_poison_memory_region(p, kSharedArena);
#endif
    return p;
}();

void clear_shared(size_t bytes, size_t limit) {
    std::memset(inside, 0, shared_end);
#if EMULATE_ASAN
    __asan_poison_memory_region(shared_memory, shared_end);
#endif
    shared_end = static_bytes = 0;
    dynamic_bytes = bytes;
    block_limit = limit;
    if (bytes > 0) declare(bytes, 16);
}

void* dynamic_shared(size_t alignment) {
    const Unchecked scope;
    if (dynamic_bytes == 0) fault("the launch asks for no dynamic shared memory");
    if (alignment > 16) fault("dynamic shared memory is aligned to 16 bytes");
    return shared_memory + 16 + (kRedZone + 31) / 32 * 32;
}

void* static_shared(size_t bytes, size_t alignment) {
    const Unchecked scope;
    static_bytes += bytes;
    if (static_bytes > 48 << 10) fault("more than 48 KiB of static shared memory");
    if (static_bytes + dynamic_bytes > block_limit)
        fault("more shared memory, static arrays included, than a block has, or (48 KiB) has without asking");
    return shared_memory + declare(bytes, alignment);
}

size_t shared_bytes() { return static_bytes + dynamic_bytes; }

void await_copy(uint32_t to, size_t bytes, bool arrived) {
    if (!arrived) std::memset(shared_memory + to, 0xff, bytes);  // NaN
    std::memset(inside + to, arrived ? declared : awaited, bytes);
}

namespace {

[[noreturn]] void illegal(size_t bytes, Kind kind, const void* code, const std::string& why) {
    fault("illegal access: " + line_of(code) + " " + verb(kind) + " " + std::to_string(bytes) + " bytes: " + why);
}

// Neither shared memory nor the GPU's, the program's or the thread's own.
void check_elsewhere(const void* p, size_t bytes, Kind kind, const void* code) {
    const auto* byte = static_cast<const char*>(p);
    const auto* arguments = static_cast<const char*>(now.launch->arguments.get());
    const bool argument = byte >= arguments && byte < arguments + now.launch->argument_bytes;
    if (!argument && place_of(p, bytes) != Place::pinned)
        illegal(bytes, kind, code, "memory of the host that is not pinned");
}

// A copy for each size: this is half of what the emulated GPU does.
__attribute__((always_inline)) inline void check(const void* p, size_t bytes, Kind kind, const void* code) {
    const Unchecked scope;
    const auto address = reinterpret_cast<uintptr_t>(p);
    const auto* byte = static_cast<const char*>(p);
    const bool aligned = bytes > 16 || (bytes & (bytes - 1)) != 0 || (address & (bytes - 1)) == 0;
    if (byte >= now.stack && byte < now.stack_end) return;  // the thread's own variables
    if (const auto offset = size_t(byte - shared_memory); offset < kSharedArena) {
        if (offset + bytes > kSharedArena || inside[offset] != declared || inside[offset + bytes - 1] != declared) {
            const bool copied = inside[offset] == awaited || inside[offset + bytes - 1] == awaited;
            illegal(bytes, kind, code,
                    copied ? "a thread copies there and has not waited for the copy" : "not declared in shared memory");
        }
        if (shared_words) check_races(shared_words, offset, bytes, kind, code, true);
        if (counting) count_access(offset, bytes, true, kind, code);
    } else if (byte >= &__executable_start && byte < &_end) {
        return;  // __constant__, threadIdx
    } else if (const auto offset = size_t(byte - now.arena); offset < kArena) {
        if (!is_live(offset, bytes)) illegal(bytes, kind, code, describe(p));
        if (global_words) check_races(global_words, offset, bytes, kind, code, false);
        if (counting) count_access(offset, bytes, false, kind, code);
    } else {
        return check_elsewhere(p, bytes, kind, code);
    }
    if (!aligned) illegal(bytes, kind, code, "the address is not a multiple of that; " + describe(p));
}

}  // namespace

void check_access(const void* p, size_t bytes, Kind kind, const void* code) { check(p, bytes, kind, code); }

}  // namespace emulate

// ---- what -fsanitize=thread calls ----
#define EMULATE_ACCESS(name, bytes, kind)                                                                  \
    void name(const void* p) {                                                                             \
        if (emulate::checking) emulate::check(p, bytes, emulate::Kind::kind, __builtin_return_address(0)); \
    }
#define EMULATE_ACCESSES(bytes)                              \
    EMULATE_ACCESS(__tsan_read##bytes, bytes, read)          \
    EMULATE_ACCESS(__tsan_write##bytes, bytes, write)        \
    EMULATE_ACCESS(__tsan_volatile_read##bytes, bytes, read) \
    EMULATE_ACCESS(__tsan_volatile_write##bytes, bytes, write)
// std::atomic and static variables in the host's part of the .cu files
#define EMULATE_ATOMIC(bits, type)                                                                                \
    type __tsan_atomic##bits##_load(const volatile type* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    void __tsan_atomic##bits##_store(volatile type* p, type x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); } \
    type __tsan_atomic##bits##_exchange(volatile type* p, type x, int) {                                          \
        return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                                                       \
    }                                                                                                             \
    type __tsan_atomic##bits##_fetch_add(volatile type* p, type x, int) {                                         \
        return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                             \
    type __tsan_atomic##bits##_fetch_sub(volatile type* p, type x, int) {                                         \
        return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                             \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type x, int, int) {       \
        return __atomic_compare_exchange_n(p, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);            \
    }

extern "C" {
EMULATE_ACCESSES(1)
EMULATE_ACCESSES(2)
EMULATE_ACCESSES(4)
EMULATE_ACCESSES(8)
EMULATE_ACCESSES(16)
EMULATE_ATOMIC(8, uint8_t)
EMULATE_ATOMIC(32, uint32_t)
EMULATE_ATOMIC(64, uint64_t)
void __tsan_read_range(const void* p, size_t bytes) {
    if (emulate::checking) emulate::check_access(p, bytes, emulate::Kind::read, __builtin_return_address(0));
}
void __tsan_write_range(const void* p, size_t bytes) {
    if (emulate::checking) emulate::check_access(p, bytes, emulate::Kind::write, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
}
