#pragma once
// The emulated GPU, as the emulated runtime and libraries see it. Kernels see include/cuda_runtime.h.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace emulate {

// ---- settings: environment variables, read once (README.md) ----
std::string setting(const char* name, const char* otherwise);
// The place among `values` of a variable's value, 0 if it is not set; faults at any other value.
int choice(const char* name, const std::vector<std::string>& values);
int number(const char* name, const std::string& otherwise, int least);
uint64_t random();  // a sequence that EMULATE_SEED determines; call it with the device locked, as operations do

// ---- errors ----
// Ends the process with "emulate: WHAT", where it happened in a kernel if one runs, and code 134 (abort).
[[noreturn]] void fault(const std::string& what);
// What a library refuses: "emulate: WHAT" on stderr; returns false. The caller returns its own error code.
bool refuse(const std::string& what);

// ---- devices ----
int multiprocessors();  // of each GPU
int capability();       // 90: 9.0

// ---- streams ----
// Appends an operation to a stream. It runs after everything before it in the stream, at a moment that EMULATE_STREAMS
// chooses, with device memory accessible. `step` returns true when it is done; false: it waits for another process and
// is called again later.
void enqueue(cudaStream_t stream, const std::string& name, std::function<bool()> step);

bool device_is_idle();  // the current GPU: all of its streams

// ---- memory ----
// Whether [p, p + bytes) lies within one allocation of the current GPU that has not been released. bytes may be 0.
// In an operation: also that it exists by then, in the order of the stream that it was allocated in.
bool on_device(const void* p, size_t bytes);
std::string describe(const void* p);  // for messages

}  // namespace emulate
