#include "copy_entries.h"

#include "row_walk.h"

namespace maru {

namespace {

void append(std::vector<CopyEntry>& entries, const CopyEntry& entry) {
    if (!entries.empty()) {
        CopyEntry& last = entries.back();
        if (last.destination + last.bytes == entry.destination &&
            last.source + last.bytes == entry.source) {
            last.bytes += entry.bytes;
            return;
        }
    }
    entries.push_back(entry);
}

int64_t bytes_from(const void* from, const void* to) {
    return reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from);
}

bool is_pitch(int64_t distance, int64_t row_bytes) {
    return distance >= row_bytes && distance <= kMaxPitch;
}

// Takes the entry into the rectangle if it is its next row.
bool extend(CopyRectangle& rectangle, const CopyEntry& entry) {
    const CopyEntry& row = rectangle.row;
    if (entry.bytes != row.bytes)
        return false;
    const int64_t destination = bytes_from(row.destination, entry.destination);
    const int64_t source = bytes_from(row.source, entry.source);
    if (rectangle.rows == 1) {
        if (!is_pitch(destination, row.bytes) || !is_pitch(source, row.bytes))
            return false;
        rectangle.destination_pitch = destination;
        rectangle.source_pitch = source;
    } else if (destination != rectangle.rows * rectangle.destination_pitch ||
               source != rectangle.rows * rectangle.source_pitch) {
        return false;
    }
    ++rectangle.rows;
    return true;
}

} // namespace

std::vector<CopyEntry> contiguous_entries(const std::vector<StridedCopy>& copies) {
    std::vector<CopyEntry> entries;
    for (const StridedCopy& copy : copies) {
        const bool load = copy.direction == TransferDirection::H2D;
        const int64_t rows = copy.num_rows();
        if (rows == 0)
            continue;
        RowWalk walk(copy, 0);
        for (int64_t row = 0; row < rows; ++row) {
            const RowPlace place = walk.place();
            if (place.cache != nullptr)
                append(entries, load ? CopyEntry{place.cache, place.object, copy.row_bytes}
                                     : CopyEntry{place.object, place.cache, copy.row_bytes});
            if (row + 1 < rows)
                walk.next();
        }
    }
    return entries;
}

std::vector<CopyRectangle> rectangles_of(const std::vector<CopyEntry>& entries) {
    std::vector<CopyRectangle> rectangles;
    for (const CopyEntry& entry : entries) {
        if (rectangles.empty() || !extend(rectangles.back(), entry))
            rectangles.push_back({entry, 1, 0, 0});
    }
    return rectangles;
}

} // namespace maru
