#include "02_data_parallel/runtime/backend_tcp.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/complete/all_reduce.h"

namespace train70b {

namespace {

[[noreturn]] void fail_with_errno(const std::string& what) {
    throw std::runtime_error(what + ": " + std::strerror(errno == EINPROGRESS || errno == EAGAIN ? ETIMEDOUT : errno));
}

// Its own calls, but not those with MSG_DONTWAIT, wait for at most so many seconds.
Socket opened(int file, double seconds = 0) {
    if (file < 0) fail_with_errno("a socket");
    const timeval limit{time_t(seconds), suseconds_t(1e6 * (seconds - double(time_t(seconds))))};
    const int on = 1;
    for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO}) setsockopt(file, SOL_SOCKET, option, &limit, sizeof limit);
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(file, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    return Socket(new int(file), [](const int* open) {
        ::close(*open);
        delete open;
    });
}

struct Address {  // IPv4
    sockaddr_in in{};
    socklen_t size = sizeof in;
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&in); }

    explicit Address(const std::string& text) {
        const size_t colon = std::min(text.rfind(':'), text.size());
        addrinfo hints{}, *found = nullptr;
        hints.ai_family = AF_INET;
        if (getaddrinfo(text.substr(0, colon).c_str(), text.substr(std::min(colon + 1, text.size())).c_str(), &hints,
                        &found) != 0)
            throw std::runtime_error(text + ": must be HOST:PORT of a host that is known here");
        std::memcpy(&in, found->ai_addr, sizeof in);
        freeaddrinfo(found);
    }
    explicit Address(const Socket& own) { getsockname(*own, get(), &size); }
};

}  // namespace

Socket connect_to(const std::string& address, double seconds) {
    Address to(address);
    const Socket socket = opened(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), seconds);
    if (::connect(*socket, to.get(), to.size) != 0) fail_with_errno(address);
    const timeval never{};
    setsockopt(*socket, SOL_SOCKET, SO_RCVTIMEO, &never, sizeof never);
    for (const auto& [option, value] : {std::pair(TCP_KEEPIDLE, 10), {TCP_KEEPINTVL, 5}, {TCP_KEEPCNT, 4}})
        setsockopt(*socket, IPPROTO_TCP, option, &value, sizeof value);  // a machine that has lost its power is noticed
    return socket;
}

TcpBackend::TcpBackend(const std::string& towards, double timeout)
    : timeout_(timeout), listener_(opened(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), timeout)) {
    Address to(towards);
    const Socket probe = opened(::socket(AF_INET, SOCK_DGRAM, 0));  // sends nothing: it only chooses an interface
    if (::connect(*probe, to.get(), to.size) != 0) fail_with_errno(towards);
    Address own(probe);
    own.in.sin_port = 0;
    if (bind(*listener_, own.get(), own.size) != 0 || listen(*listener_, 64) != 0) fail_with_errno("cannot listen");
    own = Address(listener_);
    char host[INET_ADDRSTRLEN] = {};
    inet_ntop(AF_INET, &own.in.sin_addr, host, sizeof host);
    address_ = fmt::format("{}:{}", host, ntohs(own.in.sin_port));
}

// Who has the higher number calls, and says the generation and the number.
void TcpBackend::connect(const std::vector<std::string>& addresses, int rank, int64_t generation) {
    failure_.clear();
    peers_ = std::vector<Socket>(addresses.size());
    rank_ = rank;
    try {
        int64_t hello[] = {generation, rank};
        for (int to = 0; to < rank; ++to) {
            peers_[size_t(to)] = connect_to(addresses[size_t(to)], timeout_);
            if (send(*peers_[size_t(to)], hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
                fail_with_errno(addresses[size_t(to)]);
        }
        for (int missing = size() - 1 - rank; missing > 0;) {
            const int file = accept4(*listener_, nullptr, nullptr, SOCK_CLOEXEC);
            if (file < 0) fail_with_errno("another replica does not connect");
            const Socket peer = opened(file, timeout_);
            if (recv(file, hello, sizeof hello, MSG_WAITALL) != sizeof hello || hello[0] != generation) continue;
            if (hello[1] <= rank || hello[1] >= size()) continue;
            peers_[size_t(hello[1])] = peer;
            --missing;
        }
    } catch (const std::runtime_error& error) { fail(error.what()); }
}

void TcpBackend::fail(const std::string& why) {
    failure_ = why;
    for (Socket& peer : peers_) peer.reset();
}

// Both directions at once: two ranks that only sent, and whose buffers are full, would wait for each other.
RequestPtr TcpBackend::exchange(const Tensor& out, int to, const Tensor& in, int from, Tag) {
    if (!failure_.empty()) return nullptr;
    const auto on_device = [](const Tensor& x) { return x && x.device() != Device::cpu; };
    const Tensor sent = on_device(out) ? converted(out, out.dtype(), Device::cpu) : out;
    const Tensor received = on_device(in) ? Tensor(in.shape(), in.dtype(), Device::cpu, Memory::comm) : in;
    struct Part {  // what is left of a message
        const Tensor& x;
        int peer;
        short event;
        int64_t left = x ? x.bytes() : 0;
    } parts[] = {{sent, to, POLLOUT}, {received, from, POLLIN}};
    while (parts[0].left + parts[1].left > 0) {
        pollfd files[2];
        for (int i = 0; i < 2; ++i)
            files[i] = {parts[i].left > 0 ? *peers_[size_t(parts[i].peer)] : -1, parts[i].event, 0};
        if (poll(files, 2, int(timeout_ * 1e3)) == 0) {
            const bool receives = parts[1].left > 0;
            fail(fmt::format("no byte {} replica number {} of {} for {} s", receives ? "from" : "to",
                             receives ? from : to, size(), timeout_));
            return nullptr;
        }
        for (int i = 0; i < 2; ++i) {
            if (files[i].revents == 0) continue;
            Part& part = parts[i];
            char* const at = static_cast<char*>(part.x.raw()) + part.x.bytes() - part.left;
            const ssize_t moved = i == 0 ? send(files[i].fd, at, size_t(part.left), MSG_NOSIGNAL | MSG_DONTWAIT)
                                         : recv(files[i].fd, at, size_t(part.left), MSG_DONTWAIT);
            if (moved < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (moved <= 0) {
                fail(fmt::format("replica number {} of {} has closed its connection", part.peer, size()));
                return nullptr;
            }
            part.left -= moved;
        }
    }
    sent_ += sent ? sent.bytes() : 0;
    if (!on_device(in)) return nullptr;
    Tensor result = in;
    copy(result, received);
    return nullptr;
}

RequestPtr TcpBackend::all_reduce(const Tensor& x, Reduce reduce) {
    CHECK(reduce == Reduce::sum, "sums only");
    ring_all_reduce(*this, x);
    return nullptr;
}

}  // namespace train70b
