#include "02_data_parallel/runtime/mpi_group.h"

#include <cstring>
#include <thread>

#include "01_single_gpu/core/bf16.h"

namespace train70b {

namespace {

std::string text_of(int status) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(status, text, &length);
    return text;
}

#define MPI_CHECK(call)                                              \
    do {                                                             \
        const int mpi_status = (call);                               \
        CHECK(mpi_status == MPI_SUCCESS, "{}", text_of(mpi_status)); \
    } while (0)

// MPI has no bf16. Every addition is in fp32 and rounds its result; a NaN stays a NaN in sum and max.
template <bool kSum>
void combine_bf16(void* in, void* in_out, int* count, MPI_Datatype*) {
    const auto* a = static_cast<const bf16*>(in);
    auto* b = static_cast<bf16*>(in_out);
    for (int i = 0; i < *count; ++i) {
        const float x = float(a[i]), y = float(b[i]);
        b[i] = bf16(kSum ? x + y : (x > y || x != x ? x : y));
    }
}

MPI_Op operation_of(MPI_User_function* combine) {
    MPI_Op op = MPI_OP_NULL;
    MPI_CHECK(MPI_Op_create(combine, 1, &op));
    return op;
}

std::pair<MPI_Datatype, MPI_Op> reduction(DType dtype, Reduce reduce) {
    static const MPI_Op bf16_sum = operation_of(combine_bf16<true>), bf16_max = operation_of(combine_bf16<false>);
    const bool is_sum = reduce == Reduce::sum;
    const MPI_Op op = is_sum ? MPI_SUM : MPI_MAX;
    switch (dtype) {
        case DType::f64: return {MPI_DOUBLE, op};
        case DType::f32: return {MPI_FLOAT, op};
        case DType::i32: return {MPI_INT32_T, op};
        case DType::bf16: return {MPI_UINT16_T, is_sum ? bf16_sum : bf16_max};
        default: CHECK(false, "no reduction of {}", name_of(dtype));
    }
    return {};
}

const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// Calls body(begin, count) for pieces of [0, total) that are small enough for one MPI call.
template <class Body>
void in_pieces(int64_t total, Body&& body) {
    for (int64_t begin = 0; begin < total; begin += MpiGroup::largest_count)
        body(begin, int(std::min(total - begin, MpiGroup::largest_count)));
}

int in_world(MPI_Comm comm, int rank) {
    MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
    MPI_Comm_group(comm, &group);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    int found = -1;
    MPI_Group_translate_ranks(group, 1, &rank, world, &found);
    return found;
}

class MpiExchange : public Request {
  public:
    explicit MpiExchange(MPI_Comm comm) : comm_(comm) {}
    ~MpiExchange() override {
        if (std::uncaught_exceptions() == 0) wait();
    }
    void wait() override {
        // Not MPI_Waitall: in Open MPI 4.1 it can wait forever for a receive that has failed. With more ranks than
        // cores another rank, perhaps the one waited for, goes on here: MPI yields only where mpirun knows of it.
        while (!test()) std::this_thread::yield();
    }
    bool test() override {
        if (requests.empty()) return true;
        std::vector<MPI_Status> statuses(requests.size());
        int done = 0;
        const int status = MPI_Testall(int(requests.size()), requests.data(), &done, statuses.data());
        if (!done && status == MPI_SUCCESS) return false;
        requests.clear();
        for (const auto& [index, from, bytes] : receives) {
            const bool fits = status == MPI_SUCCESS || statuses[index].MPI_ERROR == MPI_SUCCESS;
            int arrived = 0;
            if (fits) MPI_Get_count(&statuses[index], MPI_BYTE, &arrived);
            CHECK(fits, "mismatch: rank {} sent more than the {} bytes this rank expected", in_world(comm_, from),
                  bytes);
            CHECK(arrived == bytes, "mismatch: rank {} sent {} bytes, this rank expected {}", in_world(comm_, from),
                  arrived, bytes);
        }
        MPI_CHECK(status);
        return true;
    }

    struct Receive {
        size_t request;
        int from, bytes;
    };
    std::vector<MPI_Request> requests;
    std::vector<Receive> receives;

  private:
    const MPI_Comm comm_;
};

}  // namespace

MpiGroup::MpiGroup(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
}

MpiGroup::~MpiGroup() {
    int over = 0;
    MPI_Finalized(&over);
    if (!over && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);  // freeing is collective
}

MPI_Comm MpiGroup::duplicate_of_world() {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    return comm;
}

MPI_Comm MpiGroup::split(const std::vector<int>& colors) const {
    MPI_Comm comm = MPI_COMM_NULL;
    const int color = colors[rank_] < 0 ? MPI_UNDEFINED : colors[rank_];
    MPI_CHECK(MPI_Comm_split(comm_, color, rank_, &comm));
    return comm;
}

RequestPtr MpiGroup::exchange(const void* out, int64_t out_bytes, int to, void* in, int64_t in_bytes, int from,
                              Tag tag) const {
    auto exchange = std::make_shared<MpiExchange>(comm_);
    in_pieces(in_bytes, [&](int64_t begin, int count) {
        exchange->receives.push_back({exchange->requests.size(), from, count});
        exchange->requests.push_back(MPI_REQUEST_NULL);
        MPI_CHECK(MPI_Irecv(at(in, begin), count, MPI_BYTE, from, int(tag), comm_, &exchange->requests.back()));
    });
    in_pieces(out_bytes, [&](int64_t begin, int count) {
        exchange->requests.push_back(MPI_REQUEST_NULL);
        MPI_CHECK(MPI_Isend(at(out, begin), count, MPI_BYTE, to, int(tag), comm_, &exchange->requests.back()));
    });
    if (exchange->requests.empty()) return nullptr;
    return exchange;
}

void MpiGroup::all_reduce(void* x, int64_t count, DType dtype, Reduce reduce) const {
    const auto [type, op] = reduction(dtype, reduce);
    in_pieces(count, [&, type = type, op = op](int64_t begin, int piece) {
        MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, at(x, begin * size_of(dtype)), piece, type, op, comm_));
    });
}

void MpiGroup::reduce_scatter(void* part, const void* whole, int64_t part_count, DType dtype) const {
    const auto [type, op] = reduction(dtype, Reduce::sum);
    if (part_count * size_ <= largest_count) {
        const std::vector<int> counts(size_, int(part_count));
        MPI_CHECK(MPI_Reduce_scatter(whole, part, counts.data(), type, op, comm_));
        return;
    }
    for (int root = 0; root < size_; ++root)
        in_pieces(part_count, [&, type = type, op = op](int64_t begin, int piece) {
            MPI_CHECK(MPI_Reduce(at(whole, (root * part_count + begin) * size_of(dtype)),
                                 at(part, begin * size_of(dtype)), piece, type, op, root, comm_));
        });
}

void MpiGroup::all_gather(void* whole, const void* part, int64_t part_bytes) const {
    char* own = at(whole, rank_ * part_bytes);
    if (own != part && part_bytes > 0) std::memcpy(own, part, part_bytes);
    if (part_bytes * size_ <= largest_count) {
        MPI_CHECK(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, whole, int(part_bytes), MPI_BYTE, comm_));
        return;
    }
    for (int root = 0; root < size_; ++root) broadcast(at(whole, root * part_bytes), part_bytes, root);
}

void MpiGroup::broadcast(void* x, int64_t bytes, int root) const {
    in_pieces(bytes,
              [&](int64_t begin, int count) { MPI_CHECK(MPI_Bcast(at(x, begin), count, MPI_BYTE, root, comm_)); });
}

void MpiGroup::all_to_all(void* to, const void* from, int64_t part_bytes) const {
    if (part_bytes * size_ <= largest_count) {
        MPI_CHECK(MPI_Alltoall(from, int(part_bytes), MPI_BYTE, to, int(part_bytes), MPI_BYTE, comm_));
        return;
    }
    for (int step = 0; step < size_; ++step) {
        const int next = (rank_ + step) % size_, previous = (rank_ + size_ - step) % size_;
        if (const RequestPtr request = exchange(at(from, next * part_bytes), part_bytes, next,
                                                at(to, previous * part_bytes), part_bytes, previous, Tag::algorithm))
            request->wait();
    }
}

void MpiGroup::barrier() const { MPI_CHECK(MPI_Barrier(comm_)); }

std::vector<double> MpiGroup::gather(const std::vector<double>& local) const {
    std::vector<double> all(local.size() * size_);
    MPI_CHECK(
        MPI_Allgather(local.data(), int(local.size()), MPI_DOUBLE, all.data(), int(local.size()), MPI_DOUBLE, comm_));
    return all;
}

std::vector<std::string> gather_text(MPI_Comm comm, const std::string& local) {
    int size = 0;
    MPI_CHECK(MPI_Comm_size(comm, &size));
    std::vector<int> lengths(size), begins(size);
    const int length = int(local.size());
    MPI_CHECK(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm));
    for (int i = 1; i < size; ++i) begins[i] = begins[i - 1] + lengths[i - 1];
    std::string all(size_t(begins.back() + lengths.back()), ' ');
    MPI_CHECK(
        MPI_Allgatherv(local.data(), length, MPI_CHAR, all.data(), lengths.data(), begins.data(), MPI_CHAR, comm));
    std::vector<std::string> list;
    for (int i = 0; i < size; ++i) list.push_back(all.substr(begins[i], lengths[i]));
    return list;
}

bool mpi_is_started() {
    int started = 0;
    MPI_Initialized(&started);
    return started;
}

int world_size() {
    int size = 1;
    if (mpi_is_started()) MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

int over_all_ranks(int value, MPI_Op op) {
    int result = value;
    if (mpi_is_started()) MPI_Allreduce(&value, &result, 1, MPI_INT, op, MPI_COMM_WORLD);
    return result;
}

}  // namespace train70b
