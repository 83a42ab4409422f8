// Copies by the device's copy engines, which take no SM from the engine's kernels.
//
// One call of cudaMemcpyBatchAsync where the toolkit that compiled this, the runtime in the process
// and the driver all have it (12.8); cudaMemcpyAsync and cudaMemcpy2DAsync otherwise, for a single
// piece, for host memory that is not pinned, and on the legacy default stream, which batches
// refuse.

#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "copy_entries.h"

namespace maru {

// What the host side of a copy is.
enum class HostMemory {
    kPinned,
    kPageable, // every call may hold the calling thread, and the stream, until it has staged
};

// Whether the process can queue batches. Asks once.
bool batches_are_available();

// Whether a batch is what carries out such a copy on this stream.
bool goes_as_a_batch(const std::vector<CopyEntry>& entries, HostMemory host, cudaStream_t stream);

// Queues the entries on the stream. Entries must not overlap. The list itself may go when this
// returns. In a load (H2D) the sources are objects that nothing writes before the copy is done,
// also not work that the stream has still to do: a batch may read them ahead of the stream. In a
// store they are what the stream's earlier work has written, and are read in its order.
cudaError_t copy_with_engine(const std::vector<CopyEntry>& entries, TransferDirection direction,
                             HostMemory host, cudaStream_t stream);

} // namespace maru
