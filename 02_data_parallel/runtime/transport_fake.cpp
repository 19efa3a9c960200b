// The fake transport: rank r of N ranks, of which only this one exists. Collectives behave as if every peer held a copy
// of this rank's data: finite and of the right size, where zeros would run too fast through the products and random
// sums could end in NaN. Memory, shapes and the time of computation are those of the real rank; communication takes no
// time. Host, device and meta tensors.
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/transport.h"

namespace train70b {

namespace {

class FakeTransport : public Transport {
  public:
    FakeTransport(int rank, int size) : rank_(rank), size_(size) {}
    const char* name() const override { return "fake"; }
    bool has_peers() const override { return false; }
    int rank() const override { return rank_; }
    int size() const override { return size_; }

    std::unique_ptr<Transport> split(const std::vector<int>& colours) const override {
        const int mine = colours[rank_];
        if (mine < 0) return nullptr;
        const auto before = std::count(colours.begin(), colours.begin() + rank_, mine);
        return std::make_unique<FakeTransport>(int(before), int(std::count(colours.begin(), colours.end(), mine)));
    }
    Handle aside(const std::function<void()>& body) override {
        body();
        return nullptr;
    }
    Handle exchange(const Tensor&, int, const Tensor& in, int, Channel) override {
        if (!in || in.size() == 0) return nullptr;
        Tensor received = in;
        if (in.dtype() == DType::f64 || in.dtype() == DType::f32 || in.dtype() == DType::bf16)
            fill_normal(received, 1, {0, 0, in.size(), in.size(), 0}, 1.0f);
        else if (in.dtype() == DType::i32)
            fill(received, 0);
        return nullptr;
    }
    Handle all_reduce(const Tensor& x, Reduce reduce) override {
        Tensor sum = x;
        if (reduce == Reduce::max) return nullptr;
        if (x.dtype() != DType::i32) {
            scale(sum, size_);
        } else if (x.device() != Device::meta) {
            std::vector<int32_t> values(x.size());
            Tensor host = upload(values, x.shape(), Device::cpu, Memory::comm);
            copy(host, x);
            for (int64_t i = 0; i < x.size(); ++i) host.data<int32_t>()[i] *= size_;
            copy(sum, host);
        }
        return nullptr;
    }
    Handle reduce_scatter(const Tensor& part, const Tensor& whole) override {
        Tensor sum = part;
        const Tensor mine = whole.element_slice(rank_ * part.size(), part.shape());
        if (!part.starts_with(mine)) copy(sum, mine);
        scale(sum, size_);
        return nullptr;
    }
    Handle all_gather(const Tensor& whole, const Tensor& part) override {
        for (int i = 0; i < size_; ++i) {
            Tensor place = whole.element_slice(i * part.size(), part.shape());
            if (!place.starts_with(part)) copy(place, part);
        }
        return nullptr;
    }
    Handle broadcast(const Tensor&, int) override { return nullptr; }
    Handle all_to_all(const Tensor& to, const Tensor& from) override {
        const Shape part = {from.size() / size_};
        for (int i = 0; i < size_; ++i) {
            Tensor place = to.element_slice(i * part[0], part);
            copy(place, from.element_slice(rank_ * part[0], part));
        }
        return nullptr;
    }
    void barrier() override {}
    std::vector<double> gather(const std::vector<double>& mine) override {
        std::vector<double> all;
        for (int i = 0; i < size_; ++i) all.insert(all.end(), mine.begin(), mine.end());
        return all;
    }
    std::vector<std::string> gather_text(const std::string& mine) override {
        return std::vector<std::string>(size_t(size_), mine);
    }

  private:
    int rank_, size_;
};

}  // namespace

std::unique_ptr<Transport> make_fake_transport(int rank, int size) {
    return std::make_unique<FakeTransport>(rank, size);
}

}  // namespace train70b
