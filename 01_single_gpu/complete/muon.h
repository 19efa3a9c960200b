#pragma once
// Muon (Jordan et al. 2024): a matrix moves by its orthogonalized momentum, so that every direction of it moves equally
// far. With g = grad * grad_scale:
//   exp_avg <- 0.95 exp_avg + 0.05 g,   u = 0.05 g + 0.95 exp_avg                         (Nesterov's momentum)
//   w       <- w (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, cols)) orthogonalized(u)
// An orthogonal matrix has a root mean square of 1 / sqrt(max(rows, cols)), so the update has 0.2, as AdamW's in
// practice (Liu et al. 2025, "Moonlight"): learning rate and weight decay are AdamW's. Embedding, head and vectors are
// AdamW's altogether. State per element of a matrix: exp_avg, 4 bytes, and a master weight for bf16 parameters.
#include <utility>

#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/optimizer.h"

namespace train70b {

// By Newton-Schulz: U diag(s) V^T becomes nearly U V^T, s between 0.7 and 1.2 wherever it was not tiny. Five steps of
//   x <- a x + (b A + c A^2) x,  A = x x^T          a = 3.4445, b = -4.7750, c = 2.0315
// from u / |u|, in this dtype: three products each. A is the smaller of x x^T and x^T x. u: (rows, cols).
inline constexpr int kNewtonSchulzSteps = 5;
Tensor orthogonalized(const Tensor& u, DType dtype);
double newton_schulz_flops(int64_t rows, int64_t cols);

bool takes_muon(const Param& param);               // a matrix, or a stack of them, inside a block
int64_t muon_elements(const LlamaConfig& c);       // of all such parameters
double muon_share(const LlamaConfig& config);      // the same, of one parameter
void check_muon(bool mup, bool offloads = false);  // usage error

// Orthogonalizes the gradients of all segments with matrices, in place; here they are whole. Where ranks hold parts of
// them: chapter 03 (matrix_owners.h).
class Orthogonalizer {
  public:
    virtual ~Orthogonalizer() = default;
    void add(const Segment& segment) { segments_.push_back(segment); }  // once, before the first step
    void prepare() { pending_ = true; }
    void run() {  // once after prepare()
        if (std::exchange(pending_, false)) orthogonalize();
    }

  protected:
    virtual void orthogonalize();
    std::vector<Segment> segments_;

  private:
    bool pending_ = false;
};

class Muon : public AdamW {
  public:
    Muon(std::vector<Segment> segments, const Hyper& hyper, std::shared_ptr<Orthogonalizer> matrices, Memory states);
    static MakeOptimizer maker(const Hyper& hyper, std::shared_ptr<Orthogonalizer> matrices) {
        return maker_of<Muon>(hyper, matrices);
    }

    // The gradients of matrices become u, and are orthogonal after the first update() of a step.
    void prepare(double grad_scale) override;
    void update(int64_t step, double lr, double grad_scale) override;

  private:
    void update_segment(State& state, const AdamWStep& step) override;

    const std::shared_ptr<Orthogonalizer> matrices_;
};

}  // namespace train70b
