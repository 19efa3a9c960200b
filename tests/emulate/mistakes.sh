#!/usr/bin/env bash
# What the emulated GPU and its translator say about mistakes (mistakes.cu): each must be named, with its place.
#   bash tests/emulate/mistakes.sh BIN
here=$(dirname "$0")
bin=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
verdict() { # WHAT, ACCEPTED (0: yes), OUTPUT
    if [ "$2" = 0 ]; then echo "ok   $1"; else echo "FAIL $1: $3"; failed=1; fi
}
expect() { # MISTAKE, EXIT CODE (128 + 6: abort), WHAT IT SAYS
    local output code
    output=$(EMULATE_RACES=1 EMULATE_GPUS=2 "$bin/emulated_mistakes" "$1" 2>&1)
    code=$?
    grep -qF -- "$3" <<<"$output" && [ "$code" = "$2" ]
    verdict "$1" $? "exit code $code, not $2 with '$3': $output"
}
expect "none" 0 "640"
line() { echo "tests/emulate/mistakes.cu:$(grep -n "$1" "$here/mistakes.cu" | head -1 | cut -d: -f1)"; }
expect "bound" 134 "illegal access: $(line 'x\[at\] = 1') writes 4 bytes: 256 bytes into 256 bytes of memory of GPU 0"
expect "bound" 134 "in write_kernel, block 0 0 0, thread 0 0 0"
expect "released" 134 "0 bytes into 256 bytes of memory of GPU 0, already released"
expect "released twice" 134 "cudaFreeAsync of what is no live allocation of this GPU"
expect "host pointer" 134 "memory of the host that is not pinned"
expect "host touches" 139 "the host touches"
expect "alignment" 134 "the address is not a multiple of that"
expect "race" 134 "race in shared memory, no barrier between"
expect "race" 134 "$(line 'tile\[(threadIdx')"
for order in forward reverse random; do
    export EMULATE_ORDER=$order
    expect "race of tiles" 134 "race in shared memory, no barrier between"
    expect "race of bytes" 134 "race in shared memory, no barrier between"
done
unset EMULATE_ORDER
expect "race of blocks" 134 "race in global memory, no barrier between"
for order in forward reverse random; do
    export EMULATE_ORDER=$order
    expect "copy" 0 ""
    expect "copy not waited for" 134 "$(line 'may be on its way') reads 4 bytes: a thread copies there and has not waited for"
    expect "copy without barrier" 134 "race in shared memory, no barrier between"
    expect "copy over what is read" 134 "race in shared memory, no barrier between"
done
unset EMULATE_ORDER
expect "copy forgotten" 134 "a thread ends and has not waited for its copy: $(line 'cp.async.ca')"
expect "copy out of bounds" 134 "reads 4 bytes: 252 bytes into 252 bytes of memory of GPU 0"
expect "shared bound" 134 "not declared in shared memory"
expect "divergent barriers" 134 "divergent barriers"
expect "divergent warp" 134 "divergent warp"
expect "no dynamic memory" 134 "the launch asks for no dynamic shared memory"
expect "shared without asking" 3 "launch of dynamic_kernel: more than 48 KiB of shared memory must be allowed"
expect "empty grid" 3 "launch of add_kernel: an empty grid (grid 0 1 1, block 64 1 1"
expect "block too large" 3 "a block has 1 to 1024 threads"
expect "default stream" 134 "not a stream"
expect "other GPU" 3 "the stream belongs to another GPU than the current one"
expect "copy bound" 3 "cudaMemcpyAsync: 0 bytes into 32 bytes of memory of GPU 0, 256 bytes to copy"
expect "copy direction" 3 "the direction is not that of the pointers"

translates() { # WHAT, TEXT, MESSAGE, or empty: it is known
    local output code
    printf '%s\n' "// a comment with <<< and __shared__ and asm" "$2" >"$work/in.cu"
    output=$(python3 "$here/transform.py" in.cu "$work/in.cu" "$work/out.cpp" 2>&1)
    code=$?
    if [ -z "$3" ]; then [ "$code" = 0 ]; else [ "$code" = 1 ] && grep -qF -- "$3" <<<"$output"; fi
    verdict "translation: $1" $? "exit code $code: $output"
}
translates "a kernel" '__global__ void f(float* x) { __shared__ float a[2][3], b; x[0] = expf(x[1]); __syncthreads(); }' ""
translates "shared memory with an initial value" '__global__ void f() { __shared__ float a[2] = {}; }' "in.cu:2: __shared__"
translates "PTX" '__device__ void f() { asm volatile("wgmma.fence.sync.aligned;" :: ); }' "PTX instruction wgmma.fence.sync.aligned;"
translates "asm without volatile" '__device__ void f() { asm("nop;"); }' "in.cu:2: asm"
translates "a launch of two values" 'void f() { k<<<1, 2>>>(); }' "a launch without grid, block, shared memory and stream"
translates "an intrinsic" '__device__ int f(int x) { return __brev(x); }' "in.cu:2: __brev"
translates "a function" '__device__ float f(float x) { return powf(x, 2); }' "the function powf"
exit $failed
