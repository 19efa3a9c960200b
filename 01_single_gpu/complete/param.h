#pragma once
// A parameter, and the rectangle of it that this rank holds.
#include <vector>

#include "01_single_gpu/complete/group.h"
#include "01_single_gpu/ops/ops.h"

namespace train70b {

// A rectangle of a row-major matrix; a vector of n elements is a matrix of n rows and one column.
struct Rect {
    int64_t row_begin = 0, rows = 0, col_begin = 0, cols = 1;
    int64_t size() const { return rows * cols; }
};

struct Param {
    std::string name;    // Hugging Face's, e.g. model.layers.0.self_attn.q_proj.weight
    Shape global_shape;  // of the full parameter: (out, in), or (n) for a norm weight
    Rect local;  // this rank's; tensor parallelism narrows it. Rows beyond the last, 0: all ranks hold as many rows
    bool over_ep = false;  // divided over the ranks of Groups::ep, and replicated over edp, instead of tp and dp_cp
    int replicas = 1;  // ranks of one model copy that hold this same rectangle (norm weights under tensor parallelism,
                       // tied embeddings in a pipeline)
    int replica = 0;   // this rank's index among them: only replica 0 counts in norms and writes checkpoints
    // The replicas whose gradients must be summed: each is of a part of the activations. Null: each has the full one.
    GroupPtr partial_grad_group;
    double init_std = 0;    // 0: all elements are init_value
    double init_value = 1;  // 1: norm weights; 0: biases
    double lr_scale = 1;    // the learning rate is multiplied by it (muP); weight decay is not
    int64_t matrices = 1;   // of equal size, one below the other

    Tensor data, grad;  // views into flat buffers; the ParamStore that owns those may replace them between uses

    bool is_matrix() const { return global_shape.size() == 2; }
    int64_t matrix_rows() const { return global_shape[0] / matrices; }
    int64_t global_size() const;
    Shape local_shape() const { return is_matrix() ? Shape{local.rows, local.cols} : Shape{local.rows}; }
    Rect real() const;  // `local` without its padding
    // Maps element `offset` of the local rectangle, and those after it, to their global indices.
    GlobalIndex global_index(int64_t offset) const {
        return {local.row_begin, local.col_begin, local.cols, is_matrix() ? global_shape[1] : 1, offset};
    }
    uint64_t key(uint64_t seed) const;  // of this parameter's random numbers
};

Param make_param(std::string name, Shape global_shape, double init_std);
Param make_bias(std::string name, int64_t size);

// Writes the initial values of elements [offset, offset + to.size()) of the parameter's local rectangle. They depend
// only on (seed, name, global index), so every layout starts from the same weights.
void initialize(const Param& param, uint64_t seed, int64_t offset, Tensor& to);

// Make data, or grad, of the params consecutive views into a flat buffer, in order, from element 0. An empty buffer
// makes the views empty.
int64_t total_size(const std::vector<Param*>& params);  // elements this rank holds
void bind_data(const std::vector<Param*>& params, const Tensor& flat);
void bind_grads(const std::vector<Param*>& params, const Tensor& flat);

Tensor zeros(Shape shape, DType dtype, Device device, Memory kind);
void copy_to_flat(const Tensor& flat, const std::vector<Tensor>& parts);  // the parts one after another
void copy_from_flat(const std::vector<Tensor>& parts, const Tensor& flat);
int64_t total_size(const std::vector<Tensor>& parts);

// Sum of squares of each tensor, in order; 0 for an empty one.
std::vector<double> squares(const std::vector<Tensor>& tensors);
double total_squares(const std::vector<Tensor>& tensors);
// Of all params' data or grad, without the replicas that do not count.
enum class Which { data, grad };
double total_squares(const std::vector<Param*>& params, Which which);

}  // namespace train70b
