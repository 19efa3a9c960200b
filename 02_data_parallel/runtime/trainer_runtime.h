#pragma once
// What a run of several ranks gives the trainer: norms over ranks, communication in its reports, and waiting while
// files are written.
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

// The trainer's norms become those of a model whose parts lie on `ranks`: the root of the sum of their squares.
void sum_norms(Trainer& trainer, const Comm& ranks);

// Rank 0 writes what takes its time; the others wait for it, and the watchdog for all.
void write_files(const Comm& world, const std::function<void()>& files);

// The trainer's reports get each step's communication, and the summary the memory of all ranks.
void report_communication(Trainer& trainer, const Comm& world);

}  // namespace train70b
