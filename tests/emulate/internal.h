#pragma once
// What the parts of the emulated GPU need of each other: block.cpp runs a launch, access.cpp checks what its threads
// touch, memory.cpp owns device memory, runtime.cpp the streams, devices.cpp the GPUs and the last error.
#include "cuda_runtime.h"
#include "emulate.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define EMULATE_ASAN 1
#else
#define EMULATE_ASAN 0
#endif

namespace emulate {

std::string to_string(const Where& where);
std::string line_of(const void* code);    // "file:line" of an address in the program
std::string name_of(const void* kernel);  // a function's

// ---- block.cpp ----
void run(const Launch& launch);      // all blocks; with the device locked and its memory accessible
struct Running {                     // the CUDA thread that runs
    const Launch* launch = nullptr;  // nullptr: none
    uint64_t first_serial = 0;       // block_serial of the launch's first block
    uint16_t thread = 0, barriers = 0, warp_barriers = 0;  // its number in the block; how many it has passed
    const char *stack = nullptr, *stack_end = nullptr;
    const char* arena = nullptr;  // of its GPU's memory
};
extern Running now;
// Whether accesses are a CUDA thread's. Not those of the emulator on its behalf: of the standard library's templates,
// the linker may have chosen the copies in the kernels' objects, which report their accesses.
extern thread_local constinit bool checking;
extern thread_local constinit bool in_launch;  // whether this thread of the host runs one
class Unchecked {
  public:
    Unchecked() : before_(checking) { checking = false; }
    ~Unchecked() { checking = before_; }
    Unchecked(const Unchecked&) = delete;

  private:
    bool before_;
};

// ---- devices.cpp ----
// What cudaGetLastError() returns from here on; `what` is printed.
cudaError_t error(cudaError_t code);
cudaError_t error(cudaError_t code, const std::string& what);
int shared_limit();     // bytes of shared memory that a block may have
void create_context();  // at the first call that needs one

// ---- access.cpp ----
enum class Kind : uint8_t { read, write, atomic };
void check_access(const void* p, size_t bytes, Kind kind, const void* code);  // code: an address in the kernel
constexpr size_t kSharedArena = 256 << 10;
extern char* const shared_memory;                          // of the block that runs
void clear_shared(size_t dynamic_bytes, size_t limit);     // of static and dynamic bytes
size_t shared_bytes();                                     // static and dynamic, of the block that runs
void await_copy(uint32_t to, size_t bytes, bool arrived);  // to shared memory; NaN and not to be touched until then

// ---- counts.cpp ----
inline const bool kStats = setting("EMULATE_STATS", "0") == "1";
extern bool counting;  // whether accesses are counted
void count_access(size_t offset, size_t bytes, bool shared, Kind kind, const void* code);
void count_block(const void* kernel);  // the accesses since the last block

// ---- device_functions.cpp ----
void thread_ends();  // faults if a copy has not been waited for

// ---- memory.cpp ----
char* reserve(size_t bytes);  // address space; its pages appear as they are written
int gpu_count();
extern thread_local constinit int current_gpu;
extern thread_local constinit bool performing;  // whether this thread of the host performs an operation of a stream
inline const int64_t kTail = std::stoll(setting("EMULATE_TAIL", "0"));  // 0: all blocks run
inline const size_t kArena = size_t(kTail > 0 ? 512 : 8) << 30;         // one GPU's memory
constexpr size_t kContext = 300 << 20;             // of it, what a process's context takes, as cudaMemGetInfo() reports
const char* arena();                               // of the current GPU, which has memory
bool is_live(size_t offset, size_t bytes);         // within one allocation; in an operation: that exists by then
void* allocate(size_t bytes);                      // on the current GPU, filled with NaNs, with EMULATE_TAIL with 0;
                                                   // nullptr: out of memory
void set_bytes(void* p, int value, size_t bytes);  // memset; where EMULATE_TAIL is set, zeros take no memory
void exist(void* p);                               // from here on, in the order of its stream
void begin_release(void* p, const char* by);       // faults unless p is an allocation that nobody has released
void release(void* p);
void* allocate_pinned(size_t bytes);
void release_pinned(void* p);
enum class Place { pageable, pinned, device, invalid };  // invalid: not wholly within a live allocation
Place place_of(const void* p, size_t bytes);
size_t device_bytes();  // allocated on the current GPU
void handle_faults();   // of memory, on this thread of the host
void open_memory();     // of the current GPU, for operations
void close_memory();    // of all GPUs: from here on the host's accesses fail

}  // namespace emulate
