#include "copy_engine.h"

namespace maru {

namespace {

// The runtime's version from which cudaMemcpyBatchAsync is there; the driver's is the same number.
constexpr int kFirstWithBatches = 12080;

cudaError_t copy_in_single_calls(const std::vector<CopyEntry>& entries, cudaStream_t stream) {
    for (const CopyRectangle& rectangle : rectangles_of(entries)) {
        const CopyEntry& row = rectangle.row;
        const size_t bytes = static_cast<size_t>(row.bytes);
        const cudaError_t error =
            rectangle.rows == 1
                ? cudaMemcpyAsync(row.destination, row.source, bytes, cudaMemcpyDefault, stream)
                : cudaMemcpy2DAsync(row.destination,
                                    static_cast<size_t>(rectangle.destination_pitch), row.source,
                                    static_cast<size_t>(rectangle.source_pitch), bytes,
                                    static_cast<size_t>(rectangle.rows), cudaMemcpyDefault, stream);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

} // namespace

#if CUDART_VERSION >= 12080

// A runtime of the same major version but older than the toolkit lacks the function; the module
// must load there all the same.
#pragma weak cudaMemcpyBatchAsync

namespace {

cudaError_t copy_in_a_batch(const std::vector<CopyEntry>& entries, TransferDirection direction,
                            cudaStream_t stream) {
    std::vector<void*> destinations;
    std::vector<const void*> sources;
    std::vector<size_t> sizes;
    destinations.reserve(entries.size());
    sources.reserve(entries.size());
    sizes.reserve(entries.size());
    for (const CopyEntry& entry : entries) {
        destinations.push_back(entry.destination);
        sources.push_back(entry.source);
        sizes.push_back(static_cast<size_t>(entry.bytes));
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = direction == TransferDirection::H2D
                                    ? cudaMemcpySrcAccessOrderAny
                                    : cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first_entry_of_the_attributes = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                                &attributes, &first_entry_of_the_attributes, 1, stream);
#else
    size_t failed_entry = 0;
    return cudaMemcpyBatchAsync(destinations.data(), const_cast<void**>(sources.data()),
                                sizes.data(), sizes.size(), &attributes,
                                &first_entry_of_the_attributes, 1, &failed_entry, stream);
#endif
}

} // namespace

bool batches_are_available() {
    static const bool available = [] {
        int runtime = 0, driver = 0;
        return cudaRuntimeGetVersion(&runtime) == cudaSuccess &&
               cudaDriverGetVersion(&driver) == cudaSuccess && runtime >= kFirstWithBatches &&
               driver >= kFirstWithBatches;
    }();
    return available;
}

#else

namespace {

cudaError_t copy_in_a_batch(const std::vector<CopyEntry>& entries, TransferDirection,
                            cudaStream_t stream) {
    return copy_in_single_calls(entries, stream);
}

} // namespace

bool batches_are_available() {
    return false;
}

#endif

bool goes_as_a_batch(const std::vector<CopyEntry>& entries, HostMemory host, cudaStream_t stream) {
    const bool legacy_default_stream = stream == nullptr || stream == cudaStreamLegacy;
    return entries.size() > 1 && host == HostMemory::kPinned && !legacy_default_stream &&
           batches_are_available();
}

cudaError_t copy_with_engine(const std::vector<CopyEntry>& entries, TransferDirection direction,
                             HostMemory host, cudaStream_t stream) {
    const cudaError_t error = goes_as_a_batch(entries, host, stream)
                                  ? copy_in_a_batch(entries, direction, stream)
                                  : copy_in_single_calls(entries, stream);
    if (error != cudaSuccess)
        static_cast<void>(cudaGetLastError()); // returned, so not to be found by others as well
    return error;
}

} // namespace maru
