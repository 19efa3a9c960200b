#pragma once
// Every mathematical operation of the course, but for those of experts (routing.h): one header per family. A family is
// one set of files:
//   rmsnorm.h     the formula with its paper, and the shapes
//   rmsnorm.cpp   the readable definition on the CPU; then the public function, which checks shapes, dtypes and devices
//                 and calls the implementation of the tensors' device
//   rmsnorm.cu    the CUDA implementation, tested against the one on the CPU
// On the meta device shapes are checked and nothing is computed.
//
// The caller allocates the outputs, and thereby decides what kind of memory they are booked as. Storage is fp32, bf16
// or, on the CPU, fp64; arithmetic and sums are fp32 or wider, and all fp64 where the storage is. Reductions have a
// fixed order, so a run repeats bit for bit.
//
// The axes in all chapters: B batch, T tokens, R = B*T rows, L layers, E hidden, H heads, K key/value heads, D head
// size, F ffn, V vocabulary, N ranks; suffix _l: this rank's part.
#include "01_single_gpu/ops/adamw.h"
#include "01_single_gpu/ops/attention.h"
#include "01_single_gpu/ops/bias.h"
#include "01_single_gpu/ops/cross_entropy.h"
#include "01_single_gpu/ops/elementwise.h"
#include "01_single_gpu/ops/embedding.h"
#include "01_single_gpu/ops/matmul.h"
#include "01_single_gpu/ops/rmsnorm.h"
#include "01_single_gpu/ops/rope.h"
#include "01_single_gpu/ops/swiglu.h"
#include "01_single_gpu/ops/transfer.h"
