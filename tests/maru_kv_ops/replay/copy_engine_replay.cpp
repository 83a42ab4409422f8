// Runs copy_engine.cpp over a runtime that writes down what it is asked to do.
//
//     copy_engine_replay RUNTIME DRIVER STREAM pinned|pageable load|store SOURCES...
//
// Versions as CUDA numbers them (12080 is 12.8); STREAM a number, 0 and 1 being the legacy default
// stream. One row of 8 bytes is copied from each of the SOURCES (offsets) to the next 8 bytes.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../../maru_kv_ops/csrc/copy_engine.h"

namespace {

int runtime_version = 0, driver_version = 0;

cudaError_t refused(const char* why) {
    std::printf("refused: %s\n", why);
    return cudaErrorInvalidValue;
}

#if CUDART_VERSION >= 12080
cudaError_t run_batch(void* const* to, const void* const* from, const size_t* sizes, size_t count,
                      const cudaMemcpyAttributes* attributes, const size_t* first_entries,
                      size_t num_attributes, cudaStream_t stream) {
    if (runtime_version < 12080 || driver_version < 12080)
        return refused("not there");
    if (stream == nullptr || stream == cudaStreamLegacy)
        return refused("the legacy default stream");
    if (count == 0 || num_attributes != 1 || first_entries[0] != 0)
        return refused("an empty batch, or attributes of nothing");
    for (size_t i = 0; i < count; ++i) {
        if (sizes[i] == 0)
            return refused("an empty entry");
        std::memcpy(to[i], from[i], sizes[i]);
    }
    std::printf("batch of %zu, order %d, flags %u\n", count,
                static_cast<int>(attributes->srcAccessOrder), attributes->flags);
    return cudaSuccess;
}
#endif

} // namespace

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = runtime_version;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_version;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
    std::printf("copy of %zu\n", bytes);
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    if (width > to_pitch || width > from_pitch)
        return refused("a pitch below the width");
    std::printf("rectangle of %zu x %zu\n", height, width);
    for (size_t i = 0; i < height; ++i)
        std::memcpy(static_cast<char*>(to) + i * to_pitch,
                    static_cast<const char*>(from) + i * from_pitch, width);
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* sizes,
                                 size_t count, cudaMemcpyAttributes* attributes,
                                 size_t* first_entries, size_t num_attributes,
                                 cudaStream_t stream) {
    return run_batch(to, from, sizes, count, attributes, first_entries, num_attributes, stream);
}
#elif CUDART_VERSION >= 12080
cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first_entries,
                                 size_t num_attributes, size_t* failed_entry, cudaStream_t stream) {
    *failed_entry = count;
    return run_batch(to, from, sizes, count, attributes, first_entries, num_attributes, stream);
}
#endif

int main(int num_arguments, char** arguments) {
    if (num_arguments < 6)
        return 2;
    runtime_version = std::atoi(arguments[1]);
    driver_version = std::atoi(arguments[2]);
    const auto stream = reinterpret_cast<cudaStream_t>(std::atol(arguments[3]));
    const auto host = arguments[4] == std::string("pinned") ? maru::HostMemory::kPinned
                                                            : maru::HostMemory::kPageable;
    const auto direction = arguments[5] == std::string("load") ? maru::TransferDirection::H2D
                                                               : maru::TransferDirection::D2H;
    std::vector<uint8_t> source(4096), destination(4096), expected(4096);
    for (size_t i = 0; i < source.size(); ++i)
        source[i] = static_cast<uint8_t>(1 + i % 251);
    std::vector<int64_t> from, to;
    for (int i = 6; i < num_arguments; ++i) {
        from.push_back(std::atol(arguments[i]));
        to.push_back(8 * (i - 6));
        std::memcpy(&expected[static_cast<size_t>(to.back())],
                    &source[static_cast<size_t>(from.back())], 8);
    }

    const bool load = direction == maru::TransferDirection::H2D;
    maru::StridedCopy copy{};
    copy.direction = direction;
    copy.row_bytes = 8;
    copy.num_items = static_cast<int64_t>(from.size());
    copy.ids = load ? to.data() : from.data();
    copy.object_starts = load ? from.data() : to.data();
    copy.slots_per_block = copy.block_stride = 1;
    copy.items_per_object = std::max<int64_t>(1, copy.num_items);
    copy.own_pointers[0] = reinterpret_cast<int64_t>(load ? destination.data() : source.data());
    copy.objects[0] = reinterpret_cast<int64_t>(load ? source.data() : destination.data());
    const cudaError_t error =
        maru::copy_with_engine(maru::contiguous_entries({copy}), direction, host, stream);
    if (error != cudaSuccess || destination != expected) {
        std::printf("wrong bytes, or error %d\n", static_cast<int>(error));
        return 1;
    }
    return 0;
}
