// Strided copies between host memories, with threads.
//
// The same copies as the kernels run, in the same order of rows. Large calls write past the caches
// (non-temporal stores): what they write is larger than the caches, and reading every line before
// it is overwritten would cost a third of the bandwidth.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "strided_copy.h"

namespace maru {

enum class StoreKind {
    kCached,      // memcpy
    kNonTemporal, // past the caches, where the processor can
};

// Chooses for a call that moves this many bytes. See host_copy.cpp for where the number is from.
StoreKind store_kind_for(int64_t num_bytes);

// Rows [first, last) of one copy, on the calling thread. A non-temporal copy is visible to other
// processors when it returns.
void copy_rows(const StridedCopy& copy, int64_t first, int64_t last, StoreKind kind);

// A set of threads that share copies with their callers.
//
// `run` may be called from any thread and from several at once; it returns when all rows have been
// moved. The caller works as well, so a call never waits for a thread that does not come. Threads
// start with the first call that is worth it, inherit that caller's processor affinity, and start
// anew in a forked child. Threads that the system refuses are done without. Small calls stay on the
// calling thread.
class CopyThreads {
  public:
    explicit CopyThreads(int num_threads); // the caller included; at least 1
    ~CopyThreads();                        // no run may be in progress
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;

    void run(const std::vector<StridedCopy>& copies);
    void run(const std::vector<StridedCopy>& copies, StoreKind kind);

  private:
    struct Team;
    Team& team();
    const int num_threads_;
    std::atomic<Team*> team_{nullptr}; // no mutex: a fork could find it locked forever
};

} // namespace maru
