// The host's copies as a program of its own, for sanitizers.
//
// Says on the last line what it checked; stops with a message at the first difference.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../../maru_kv_ops/csrc/host_copy.h"
#include "../../../maru_kv_ops/csrc/row_walk.h"

namespace {

using maru::StridedCopy;
using maru::TransferDirection;

std::mt19937_64 random_numbers(20);

int64_t any(int64_t first, int64_t last) {
    return std::uniform_int_distribution<int64_t>(first, last)(random_numbers);
}

[[noreturn]] void fail(const char* what, int64_t where) {
    std::printf("%s at %lld\n", what, static_cast<long long>(where));
    std::exit(1);
}

// ------------------------------------------------------------------------ order of rows

// A copy of any shape; its addresses are numbers that nobody follows.
struct AnyCopy {
    StridedCopy copy{};
    std::vector<int64_t> ids, starts, pointers;

    AnyCopy() {
        copy.direction = TransferDirection::H2D;
        copy.row_bytes = 1;
        copy.num_axes = static_cast<int>(any(0, maru::kMaxAxes));
        copy.num_outer_axes = static_cast<int>(any(0, copy.num_axes));
        const bool own = any(0, 1) == 0;
        int64_t last_pointer = 0;
        for (int i = 0; i < copy.num_axes; ++i) {
            const int64_t count = any(1, 4);
            const int64_t step = own ? (i == 0 && count == 2) : any(0, 3);
            copy.axes[i] = {count, any(-9999, 9999), any(0, 9999), step};
            last_pointer += (count - 1) * step;
        }
        const int64_t items = any(1, 7);
        copy.first_item = any(0, items - 1);
        copy.num_items = items;
        for (int64_t i = 0; i < items; ++i) {
            ids.push_back(any(-2, 50));
            starts.push_back(any(0, 99999));
        }
        copy.ids = ids.data();
        copy.object_starts = any(0, 1) == 0 ? starts.data() : nullptr;
        for (int64_t i = 0; i <= last_pointer; ++i)
            pointers.push_back(any(1, 99) << 40);
        copy.cache_pointers = own ? nullptr : pointers.data();
        copy.own_pointers[0] = int64_t{3} << 40;
        copy.own_pointers[1] = int64_t{5} << 40;
        copy.cache_offset = any(0, 999);
        copy.slots_per_block = any(1, 4);
        copy.block_stride = any(1, 9999);
        copy.slot_stride = any(0, 999);
        copy.object_offset = any(0, 999);
        copy.items_per_object = any(1, items);
        copy.object_item_stride = any(0, 9999);
        for (int64_t& object : copy.objects)
            object = any(1, 99) << 40;
    }
};

int64_t check_row_walk(int shapes) {
    int64_t checked = 0;
    for (int i = 0; i < shapes; ++i) {
        const AnyCopy one;
        const int64_t rows = one.copy.num_rows();
        for (const int64_t first : {int64_t{0}, rows / 3, rows - 1}) {
            maru::RowWalk walk(one.copy, first);
            for (int64_t row = first; row < rows; ++row, ++checked) {
                const maru::RowPlace found = walk.place();
                const maru::RowPlace expected = maru::locate_row(one.copy, row);
                if (walk.row() != row || found.cache != expected.cache ||
                    found.object != expected.object)
                    fail("a walk is elsewhere", row);
                if (row + 1 < rows)
                    walk.next();
            }
        }
        // Every start finds what the walk from the first row finds.
        for (int64_t row = 0; row < rows; ++row)
            if (maru::RowWalk(one.copy, row).place().object !=
                maru::locate_row(one.copy, row).object)
                fail("a start is elsewhere", row);
    }
    return checked;
}

// ------------------------------------------------------------------------ bytes

// A cache of pages in shuffled order and the object that they belong to. Both buffers begin
// misaligned, and end where their last byte does.
struct Pages {
    Pages(int64_t rows, int64_t row_bytes, int64_t gap, int64_t cache_shift, int64_t object_shift,
          TransferDirection direction)
        : rows(rows), width(row_bytes), pitch(row_bytes + gap),
          cache(static_cast<size_t>(cache_shift + rows * pitch - gap)),
          object(static_cast<size_t>(object_shift + rows * row_bytes)), cache_shift(cache_shift),
          object_shift(object_shift) {
        fill(cache);
        fill(object);
        for (int64_t row = 0; row < rows; ++row)
            ids.push_back(row);
        std::shuffle(ids.begin(), ids.end(), random_numbers);
        for (size_t i = 4; i < ids.size(); i += 5)
            ids[i] = -1;
        copy.direction = direction;
        copy.row_bytes = row_bytes;
        copy.ids = ids.data();
        copy.num_items = rows;
        copy.own_pointers[0] = reinterpret_cast<int64_t>(cache.data()) + cache_shift;
        copy.slots_per_block = 1;
        copy.block_stride = pitch;
        copy.objects[0] = reinterpret_cast<int64_t>(object.data()) + object_shift;
        copy.items_per_object = rows;
        copy.object_item_stride = row_bytes;
        expected_cache = cache;
        expected_object = object;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t id = ids[static_cast<size_t>(row)];
            if (id < 0)
                continue;
            const auto in_cache = static_cast<size_t>(cache_shift + id * pitch);
            const auto in_object = static_cast<size_t>(object_shift + row * width);
            if (direction == TransferDirection::H2D)
                std::memcpy(&expected_cache[in_cache], &object[in_object],
                            static_cast<size_t>(width));
            else
                std::memcpy(&expected_object[in_object], &cache[in_cache],
                            static_cast<size_t>(width));
        }
    }

    static void fill(std::vector<uint8_t>& bytes) {
        uint64_t last = random_numbers();
        for (uint8_t& byte : bytes) {
            last = last * 6364136223846793005U + 1442695040888963407U;
            byte = static_cast<uint8_t>(last >> 56);
        }
    }

    void check() const {
        if (cache != expected_cache || object != expected_object)
            fail("another byte, rows of", width);
    }

    int64_t rows, width, pitch;
    std::vector<uint8_t> cache, object, expected_cache, expected_object;
    int64_t cache_shift, object_shift;
    std::vector<int64_t> ids;
    StridedCopy copy{};
};

constexpr std::array kDirections{TransferDirection::H2D, TransferDirection::D2H};
constexpr std::array kKinds{maru::StoreKind::kCached, maru::StoreKind::kNonTemporal};

int64_t check_rows() {
    int64_t checked = 0;
    for (const auto direction : kDirections) {
        for (const auto kind : kKinds) {
            for (const int64_t width : {1, 63, 64, 132, 1023, 1024, 1025, 1087, 1088, 4096, 4161}) {
                for (int shift = 0; shift < 4; ++shift) {
                    Pages pages(11, width, any(0, 70), any(0, 70), any(0, 70), direction);
                    const int64_t middle = any(0, pages.rows);
                    maru::copy_rows(pages.copy, 0, middle, kind);
                    maru::copy_rows(pages.copy, middle, pages.rows, kind);
                    pages.check();
                    ++checked;
                }
            }
        }
    }
    return checked;
}

// Several callers share one set of threads, with calls that are large enough to be shared.
int64_t check_threads() {
    int64_t checked = 0;
    for (const auto kind : kKinds) {
        maru::CopyThreads threads(3);
        std::vector<std::unique_ptr<Pages>> every;
        for (int i = 0; i < 4; ++i)
            every.push_back(std::make_unique<Pages>(1300, 4096 + 8 * i, 32, 7 * i, 3 * i,
                                                    kDirections[static_cast<size_t>(i % 2)]));
        std::vector<std::thread> callers;
        callers.reserve(every.size());
        for (const auto& pages : every)
            callers.emplace_back([&threads, &pages, kind] {
                for (int again = 0; again < 3; ++again)
                    threads.run({pages->copy}, kind);
                pages->check();
            });
        for (std::thread& caller : callers)
            caller.join();
        checked += static_cast<int64_t>(every.size());
    }
    return checked;
}

} // namespace

int main() {
    const int64_t walked = check_row_walk(300);
    const int64_t rows = check_rows();
    const int64_t shared = check_threads();
    std::printf("%lld rows walked, %lld copies, %lld shared calls\n",
                static_cast<long long>(walked), static_cast<long long>(rows),
                static_cast<long long>(shared));
    return 0;
}
