#pragma once
// A backend that counts what a rank sends through another one.
#include "02_data_parallel/runtime/backend.h"

namespace train70b::test {

class Counting : public Backend {
  public:
    explicit Counting(Backend& inner) : sent_to(size_t(inner.size())), inner_(inner) {
        ranks_per_node = inner.ranks_per_node;
    }
    std::vector<int> nodes() override { return given_nodes.empty() ? inner_.nodes() : given_nodes; }
    const char* name() const override { return inner_.name(); }
    int rank() const override { return inner_.rank(); }
    int size() const override { return inner_.size(); }
    std::unique_ptr<Backend> split(const std::vector<int>& colors, GroupLoad load) const override {
        return inner_.split(colors, load);
    }
    RequestPtr on_side_stream(const std::function<void()>& body) override { return inner_.on_side_stream(body); }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        if (out) sent += out.bytes(), sent_to[size_t(to)] += out.bytes();
        messages += out && out.size() > 0;
        return inner_.exchange(out, to, in, from, tag);
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override { return inner_.all_reduce(x, reduce); }
    RequestPtr reduce_scatter(const Tensor& a, const Tensor& b) override { return inner_.reduce_scatter(a, b); }
    RequestPtr all_gather(const Tensor& a, const Tensor& b) override { return inner_.all_gather(a, b); }
    RequestPtr broadcast(const Tensor& x, int root) override { return inner_.broadcast(x, root); }
    RequestPtr all_to_all(const Tensor& a, const Tensor& b) override { return inner_.all_to_all(a, b); }
    void barrier() override { inner_.barrier(); }
    std::vector<double> gather(const std::vector<double>& mine) override { return inner_.gather(mine); }
    std::vector<std::string> gather_text(const std::string& mine) override { return inner_.gather_text(mine); }

    // Bytes to ranks of other nodes, of L ranks each.
    int64_t crossed(int64_t L) const {
        int64_t bytes = 0;
        for (int to = 0; to < size(); ++to) bytes += to / L != rank() / L ? sent_to[size_t(to)] : 0;
        return bytes;
    }

    int64_t sent = 0, messages = 0;
    std::vector<int64_t> sent_to;  // by rank
    std::vector<int> given_nodes;

  private:
    Backend& inner_;
};

}  // namespace train70b::test
