#include "host_copy.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "row_walk.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace maru {

namespace {

// A second thread takes 50 to 100 us to wake on an idle core, which is what 512 KiB take to copy.
constexpr int64_t kMinSharedBytes = int64_t{4} << 20;
// What a thread takes at a time: long against the cost of taking it, short against a call.
constexpr int64_t kPieceBytes = int64_t{512} << 10;
// Rows of fewer bytes have too few whole lines for non-temporal stores to pay.
constexpr int64_t kMinStreamedRow = 1024;
// The processor's own prefetching stops at the border of a page of memory, which rows this short
// end at: while one is copied, the next one's source is fetched. Measured with rows of 4 and 8 KiB
// in any order on a busy machine: stores 1.2 to 1.3 times as fast (32 of 40 rounds), loads as
// before; from 16 KiB on nothing is won.
constexpr int64_t kMaxFetchedRow = 8192;

void copy_cached(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* /*ahead*/) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)

// Whole lines of 64 bytes to an aligned destination.
__attribute__((target("avx2"))) void stream_lines(uint8_t* to, const uint8_t* from, int64_t lines,
                                                  const uint8_t* ahead) {
    for (int64_t i = 0; i < lines; ++i) {
        if (ahead != nullptr)
            _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * i), _MM_HINT_NTA);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
        from += 64;
        to += 64;
    }
}

void copy_streamed(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* ahead) {
    const int64_t head =
        std::min<int64_t>(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63U));
    std::memcpy(to, from, static_cast<size_t>(head));
    const int64_t lines = (bytes - head) / 64;
    stream_lines(to + head, from + head, lines, ahead);
    const int64_t done = head + 64 * lines;
    std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
}

bool can_stream() {
    static const bool can = __builtin_cpu_supports("avx2") != 0;
    return can;
}

void finish_streams() {
    _mm_sfence();
}

#else

void copy_streamed(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* ahead) {
    copy_cached(to, from, bytes, ahead);
}

bool can_stream() {
    return false;
}

void finish_streams() {}

#endif

// `kCopyRow` gets the source of the row that comes next, or null.
template <void (*kCopyRow)(uint8_t*, const uint8_t*, int64_t, const uint8_t*)>
void copy_rows_by(const StridedCopy& copy, int64_t first, int64_t last) {
    const bool load = copy.direction == TransferDirection::H2D;
    const bool ahead = copy.row_bytes <= kMaxFetchedRow;
    RowWalk walk(copy, first);
    RowPlace place = walk.place();
    for (int64_t row = first; row < last; ++row) {
        RowPlace following{nullptr, nullptr};
        if (row + 1 < last) {
            walk.next();
            following = walk.place();
        }
        if (place.cache != nullptr) {
            if (load)
                kCopyRow(place.cache, place.object, copy.row_bytes,
                         ahead ? following.object : nullptr);
            else
                kCopyRow(place.object, place.cache, copy.row_bytes,
                         ahead ? following.cache : nullptr);
        }
        place = following;
    }
}

struct Piece {
    const StridedCopy* copy;
    int64_t first, last;
};

std::vector<Piece> cut(const std::vector<StridedCopy>& copies) {
    std::vector<Piece> pieces;
    for (const StridedCopy& copy : copies) {
        const int64_t rows = copy.num_rows();
        if (rows == 0)
            continue;
        const int64_t step = std::max<int64_t>(1, kPieceBytes / copy.row_bytes);
        for (int64_t first = 0; first < rows; first += step)
            pieces.push_back({&copy, first, std::min(rows, first + step)});
    }
    return pieces;
}

// One call's pieces. Whoever takes a piece finishes it.
struct Call {
    std::vector<Piece> pieces;
    StoreKind kind = StoreKind::kCached;
    std::atomic<size_t> next{0};
    std::atomic<size_t> left{0};
    std::mutex mutex;
    std::condition_variable finished;

    bool is_taken() const {
        return next.load(std::memory_order_relaxed) >= pieces.size();
    }

    void work() {
        for (;;) {
            const size_t mine = next.fetch_add(1, std::memory_order_relaxed);
            if (mine >= pieces.size())
                return;
            const Piece& piece = pieces[mine];
            copy_rows(*piece.copy, piece.first, piece.last, kind);
            if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                const std::lock_guard<std::mutex> hold(mutex);
                finished.notify_all();
            }
        }
    }

    void wait() {
        std::unique_lock<std::mutex> hold(mutex);
        finished.wait(hold, [this] { return left.load(std::memory_order_acquire) == 0; });
    }
};

} // namespace

StoreKind store_kind_for(int64_t num_bytes) {
    // Half of the last cache's size on the machines where this was measured (EPYC, 32 MiB): what is
    // smaller is likely to be read again from the cache, what is larger would flush it anyway.
    constexpr int64_t kMinStreamedBytes = int64_t{16} << 20;
    return num_bytes >= kMinStreamedBytes ? StoreKind::kNonTemporal : StoreKind::kCached;
}

void copy_rows(const StridedCopy& copy, int64_t first, int64_t last, StoreKind kind) {
    if (first >= last)
        return;
    if (kind == StoreKind::kNonTemporal && can_stream() && copy.row_bytes >= kMinStreamedRow) {
        copy_rows_by<copy_streamed>(copy, first, last);
        finish_streams();
    } else {
        copy_rows_by<copy_cached>(copy, first, last);
    }
}

struct CopyThreads::Team {
    explicit Team(int num_helpers) : owner(getpid()) {
        threads.reserve(static_cast<size_t>(num_helpers));
        try {
            for (int i = 0; i < num_helpers; ++i)
                threads.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
            // No more threads to be had here: callers do the work of those that are missing.
        }
    }

    ~Team() {
        {
            const std::lock_guard<std::mutex> hold(mutex);
            closing = true;
        }
        changed.notify_all();
        for (std::thread& thread : threads)
            thread.join();
    }

    void serve() {
        std::unique_lock<std::mutex> hold(mutex);
        for (;;) {
            changed.wait(hold, [this] { return closing || !calls.empty(); });
            if (closing)
                return;
            const std::shared_ptr<Call> call = calls.front();
            hold.unlock();
            call->work();
            hold.lock();
            drop(call);
        }
    }

    void post(const std::shared_ptr<Call>& call) {
        {
            const std::lock_guard<std::mutex> hold(mutex);
            calls.push_back(call);
        }
        changed.notify_all();
    }

    // Takes a call off the list once all its pieces are taken. The mutex is held.
    void drop(const std::shared_ptr<Call>& call) {
        const auto found = std::find(calls.begin(), calls.end(), call);
        if (found != calls.end())
            calls.erase(found);
    }

    void retire(const std::shared_ptr<Call>& call) {
        const std::lock_guard<std::mutex> hold(mutex);
        drop(call);
    }

    const pid_t owner;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::deque<std::shared_ptr<Call>> calls;
    std::vector<std::thread> threads;
};

CopyThreads::CopyThreads(int num_threads) : num_threads_(std::max(1, num_threads)) {}

CopyThreads::~CopyThreads() {
    Team* const found = team_.load(std::memory_order_acquire);
    if (found != nullptr && found->owner == getpid())
        delete found;
}

// A forked child finds its parent's team, whose threads are not here and whose mutex may be held:
// it is left as it is.
CopyThreads::Team& CopyThreads::team() {
    Team* found = team_.load(std::memory_order_acquire);
    if (found != nullptr && found->owner == getpid())
        return *found;
    auto made = std::make_unique<Team>(num_threads_ - 1);
    while (!team_.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
        if (found != nullptr && found->owner == getpid())
            return *found; // another caller was faster
    }
    return *made.release();
}

void CopyThreads::run(const std::vector<StridedCopy>& copies) {
    int64_t num_bytes = 0;
    for (const StridedCopy& copy : copies)
        num_bytes += copy.num_rows() * copy.row_bytes;
    run(copies, store_kind_for(num_bytes));
}

void CopyThreads::run(const std::vector<StridedCopy>& copies, StoreKind kind) {
    int64_t num_bytes = 0;
    for (const StridedCopy& copy : copies)
        num_bytes += copy.num_rows() * copy.row_bytes;
    if (num_threads_ == 1 || num_bytes < kMinSharedBytes) {
        for (const StridedCopy& copy : copies)
            copy_rows(copy, 0, copy.num_rows(), kind);
        return;
    }
    const auto call = std::make_shared<Call>();
    call->pieces = cut(copies);
    call->kind = kind;
    call->left = call->pieces.size();
    if (call->pieces.empty())
        return;
    Team& helpers = team();
    helpers.post(call);
    call->work();
    helpers.retire(call);
    call->wait();
}

} // namespace maru
