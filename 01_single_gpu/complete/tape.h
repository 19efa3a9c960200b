#pragma once
// Reverse-mode differentiation. An op computes its result and records a closure for its gradient; backward() runs the
// closures in reverse order and destroys each one after it ran, so every activation is freed after its last use.
//
// The order of the tape serves as the hook system: what is recorded BEFORE a block's forward pass runs AFTER its
// backward pass, and what is recorded AFTER its forward pass runs BEFORE its backward pass.
//
// Rules for closures:
//   - capture the tensors that the closure reads and Var::grad, never a Var, which would keep unused data alive
//   - capture parameters by reference and read .data when the closure runs: a ParamStore may have replaced it
//   - change a gradient in place only through accumulate(): residual branches share one buffer
#include <functional>
#include <optional>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

// A value that is computed on first use and kept until the last closure that shares it is destroyed.
template <class T>
class Lazy {
  public:
    explicit Lazy(std::function<T()> make) : state_(std::make_shared<State>(State{std::move(make), {}})) {}
    const T& get() const {
        if (!state_->value) state_->value = state_->make();
        return *state_->value;
    }

  private:
    struct State {
        std::function<T()> make;
        std::optional<T> value;
    };
    std::shared_ptr<State> state_;
};

// A value in the graph: its data, and the tensor in which its gradient accumulates. If `recomputed` is set, closures do
// not hold the data but recompute it (pointwise and selective recomputation).
struct Var {
    Tensor data;
    std::shared_ptr<Tensor> grad = std::make_shared<Tensor>();
    std::optional<Lazy<Tensor>> recomputed;

    explicit operator bool() const { return bool(data); }
};

// What a closure captures instead of an input's data.
class Saved {
  public:
    Saved(const Var& var) : recomputed_(var.recomputed) {
        if (!recomputed_) held_ = var.data;
    }
    const Tensor& get() const { return recomputed_ ? recomputed_->get() : held_; }

  private:
    Tensor held_;
    std::optional<Lazy<Tensor>> recomputed_;
};

struct Tape {
    using Steps = std::vector<std::function<void()>>;
    Steps steps;
    // Collects weight gradients to be computed later (zero-bubble pipelines); null: they are not deferred.
    Steps* deferred_wgrads = nullptr;
    bool recording = true;  // false: evaluation, and the first run of a body that will be recomputed
    bool replays = false;   // a recomputation, whose backward pass follows at once
    // Ops whose results are recomputed in the backward pass, not saved.
    bool recompute_pointwise = false;  // norms, RoPE, SwiGLU
    bool recompute_attention = false;

    void record(std::function<void()> step) {
        if (recording) steps.push_back(std::move(step));
    }
    // Records a step that computes weight gradients (wgrad), or depends on them: the backward pass runs it, or appends
    // it to `deferred_wgrads`.
    void record_wgrad(std::function<void()> step) {
        if (!deferred_wgrads) return record(std::move(step));
        record([list = deferred_wgrads, step = std::move(step)]() mutable { list->push_back(std::move(step)); });
    }
    // tag::backward[]
    void backward() {
        while (!steps.empty()) {
            auto step = std::move(steps.back());
            steps.pop_back();
            step();
        }
    }
    // end::backward[]
};

// grad += part; an empty grad becomes `part` itself. In place only if grad is the sole owner of its buffer.
inline void accumulate(Tensor& grad, const Tensor& part) {
    if (!grad) {
        grad = part;
    } else if (grad.sole_owner()) {
        add(grad, grad, part);
    } else {
        Tensor sum = Tensor::like(grad);
        add(sum, grad, part);
        grad = std::move(sum);
    }
}

// Activation recomputation (Chen et al. 2016): runs body without recording it, and records a step that runs it again on
// a new tape and then that tape's backward pass. Only x stays in memory in between.
Var recompute(Tape& tape, const Var& x, const std::function<Var(Tape&, const Var&)>& body);

}  // namespace train70b
