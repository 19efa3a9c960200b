#pragma once
// A part of the model whose parameters are used together, and unsharded, resharded and recomputed together.
#include <functional>
#include <string>
#include <vector>

#include "01_single_gpu/complete/param.h"
#include "01_single_gpu/complete/tape.h"

namespace train70b {

struct Unit {
    using Body = std::function<Var(Tape&, const Var&)>;
    // Calls `body` once. What it records before the call runs after the unit's backward pass; what it records after the
    // call runs before the unit's backward pass.
    using Wrapper = std::function<Var(Tape&, const Var& x, const Body& body)>;

    std::string name;
    std::vector<Param*> params;     // in the order of the unit's flat buffer
    std::vector<Wrapper> wrappers;  // nested; the first is the outermost
    Unit* owner = nullptr;          // of the parameters, if that is another unit: then `params` is empty
    // Empty, or makes sure that the gradients are there, for a body that adds to them before the backward pass.
    std::function<void()> open_grads;
    bool inside = false;  // runs in the middle of the unit before it: FeedForward::inner_unit

    Var run(Tape& tape, const Var& x, const Body& body) const { return run_from(0, tape, x, body); }

  private:
    Var run_from(size_t level, Tape& tape, const Var& x, const Body& body) const {
        if (level == wrappers.size()) return body(tape, x);
        return wrappers[level](tape, x, [this, level, body](Tape& inner_tape, const Var& inner_x) {
            return run_from(level + 1, inner_tape, inner_x, body);
        });
    }
};

}  // namespace train70b
