// The fake backend: a simulated process group. One process runs rank r of N, and collectives behave as if every peer
// held a copy of this rank's data, which is finite and of the right size: matrix products of zeros would run too fast,
// and random sums could become NaN. Memory, shapes and computation time are those of the real rank; communication takes
// no time. Host, device and meta tensors.
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/backend.h"
#include "02_data_parallel/runtime/ctas.h"

namespace train70b {

namespace {

class FakeBackend : public Backend {
  public:
    FakeBackend(int rank, int size, GroupLoad load = GroupLoad::light, std::shared_ptr<int> lane = nullptr)
        : rank_(rank),
          size_(size),
          is_world_(!lane),
          lane_(lane ? lane : std::make_shared<int>()),
          share_(size > 1 ? ctas_of(load) : 0, lane_.get()) {}
    const char* name() const override { return "fake"; }
    bool has_peers() const override { return false; }
    int rank() const override { return rank_; }
    int size() const override { return size_; }

    std::unique_ptr<Backend> split(const std::vector<int>& colors, GroupLoad load) const override {
        const int own = colors[rank_];
        if (own < 0) return nullptr;
        const auto before = std::count(colors.begin(), colors.begin() + rank_, own);
        return std::make_unique<FakeBackend>(int(before), int(std::count(colors.begin(), colors.end(), own)), load,
                                             has_own_lane(is_world_, load) ? std::make_shared<int>() : lane_);
    }
    RequestPtr exchange(const Tensor&, int, const Tensor& in, int, Tag) override {
        if (!in || in.size() == 0) return nullptr;
        Tensor received = in;
        if (in.dtype() == DType::f64 || in.dtype() == DType::f32 || in.dtype() == DType::bf16)
            fill_normal(received, 1, {0, 0, in.size(), in.size(), 0}, 1.0f);
        else if (in.dtype() == DType::i32)
            fill(received, 0);
        return nullptr;
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override {
        Tensor sum = x;
        if (reduce == Reduce::max) return nullptr;
        if (x.dtype() != DType::i32) {
            scale(sum, size_);
        } else if (x.device() != Device::meta) {
            Tensor host(x.shape(), DType::i32, Device::cpu, Memory::comm);
            copy(host, x);
            for (int64_t i = 0; i < x.size(); ++i) host.data<int32_t>()[i] *= size_;
            copy(sum, host);
        }
        return nullptr;
    }
    RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) override {
        Tensor sum = part;
        const Tensor own = whole.element_slice(rank_ * part.size(), part.shape());
        if (!part.starts_with(own)) copy(sum, own);
        scale(sum, size_);
        return nullptr;
    }
    RequestPtr all_gather(const Tensor& whole, const Tensor& part) override {
        for (int i = 0; i < size_; ++i) {
            Tensor slice = whole.element_slice(i * part.size(), part.shape());
            if (!slice.starts_with(part)) copy(slice, part);
        }
        return nullptr;
    }
    RequestPtr broadcast(const Tensor&, int) override { return nullptr; }
    // Peer i sends what this rank sends to itself and then, until to[i] is full, what it sends to the next ranks.
    RequestPtr all_to_all_v(const std::vector<Tensor>& to, const std::vector<Tensor>& from) override {
        const bool any = std::any_of(from.begin(), from.end(), [](const Tensor& x) { return x.size() > 0; });
        for (Tensor slice : to) {
            if (!any) fill(slice, 0);
            for (int64_t filled = 0, i = rank_; any && filled < slice.size(); ++i) {
                const Tensor& own = from[size_t(i % size_)];
                const Shape part = {std::min(own.size(), slice.size() - filled)};
                Tensor target = slice.element_slice(filled, part);
                if (part[0] > 0) copy(target, own.element_slice(0, part));
                filled += part[0];
            }
        }
        return nullptr;
    }
    void barrier() override {}
    std::vector<double> gather(const std::vector<double>& own) override {
        std::vector<double> all;
        for (int i = 0; i < size_; ++i) all.insert(all.end(), own.begin(), own.end());
        return all;
    }
    std::vector<std::string> gather_text(const std::string& own) override {
        return std::vector<std::string>(size_t(size_), own);
    }

  private:
    int rank_, size_;
    const bool is_world_;
    const std::shared_ptr<int> lane_;
    const CtaShare share_;
};

}  // namespace

std::unique_ptr<Backend> make_fake_backend(int rank, int size) { return std::make_unique<FakeBackend>(rank, size); }

}  // namespace train70b
