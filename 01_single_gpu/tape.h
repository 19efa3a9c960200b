#pragma once
// Reverse-mode differentiation. An op computes its result and records a closure for its gradient; backward() runs the
// closures newest first and drops each as it goes, so every activation is freed exactly when its last use is over.
//
// The order of the tape is the hook system of this course: what is recorded BEFORE a block's forward pass runs AFTER
// its backward pass, and what is recorded AFTER its forward pass runs BEFORE its backward pass.
//
// Rules for closures:
//   - capture the tensors you need and the gradient slots, never a whole Var, which would keep data alive that nobody reads
//   - capture parameters by reference and read .data when you run: ZeRO-3 replaces it
//   - change a gradient in place only through accumulate(): residual branches share one buffer
#include <functional>
#include <optional>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

// A value that the backward pass computes on first use and keeps until the last closure that shares it is dropped.
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

// A value in the graph: its data and the slot where its gradient will be summed. Where `recomputed` is set, closures do not
// hold the data but recompute it when they need it (pointwise and selective recomputation).
struct Var {
    Tensor data;
    std::shared_ptr<Tensor> grad = std::make_shared<Tensor>();
    std::optional<Lazy<Tensor>> recomputed;

    explicit operator bool() const { return bool(data); }
};

// What a closure captures of an input's data.
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
    Steps* deferred_wgrads =
        nullptr;            // where weight gradients wait to be run later (zero-bubble pipelines); null: not deferred
    bool recording = true;  // false: evaluation, and the first run of a body that will be recomputed
    // Recomputation inside a block: these ops return Vars that are recomputed in the backward pass, not kept.
    bool recompute_pointwise = false;  // norms, RoPE, SwiGLU
    bool recompute_attention = false;

    void record(std::function<void()> step) {
        if (recording) steps.push_back(std::move(step));
    }
    // A step that computes weight gradients (wgrad), or waits for them: when the backward pass reaches it, it runs, or is
    // appended to `deferred_wgrads`.
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

// grad += part, where an empty slot takes the part itself. In place only if nobody else holds the slot's buffer.
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

// Runs body without recording it, and records "run it again on a fresh tape, then go backward through that": of all
// that happens inside, only x stays in memory (Chen et al. 2016).
// tag::recompute[]
inline Var recompute(Tape& tape, const Var& x, const std::function<Var(Tape&, const Var&)>& body) {
    Tape silent{.recording = false};
    Var y{.data = body(silent, x).data};
    tape.record([body, deferred_wgrads = tape.deferred_wgrads, x_data = x.data, dx = x.grad, dy = y.grad] {
        Tape replay{.deferred_wgrads = deferred_wgrads};
        *body(replay, Var{.data = x_data, .grad = dx}).grad = std::move(*dy);
        replay.backward();
    });
    return y;
}
// end::recompute[]

}  // namespace train70b
