// Vectors that begin at a line of the processor's caches, and whose memory the system may map in huge pages.
//
// Vectors of the processor that lie in two lines take twice as long to load and store, and so do rows of tiles.
//
// In pages of 4 KiB, the rows of a long step take hundreds of entries of the TLB, and their lines are not spread evenly
// over the L2 cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace vmp {

// An allocator that gives large blocks whole huge pages, and other blocks whole lines.
template <class T>
struct InHugePages {
    using value_type = T;

    InHugePages() = default;
    template <class U>
    InHugePages(const InHugePages<U>&) {}

    T* allocate(size_t count) {
        if (!is_large(count)) return (T*)::operator new(count * sizeof(T), LINE);
        const size_t size = bytes_of(count);
        char* const begin = (char*)mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (begin == MAP_FAILED) throw std::bad_alloc();
        const size_t before = (PAGE - size_t(begin) % PAGE) % PAGE;
        if (before) munmap(begin, before);
        munmap(begin + before + size, PAGE - before);
        madvise(begin + before, size, MADV_HUGEPAGE);  // if the system refuses, small pages do
        return (T*)(begin + before);
    }

    void deallocate(T* memory, size_t count) {
        if (is_large(count))
            munmap((void*)memory, bytes_of(count));
        else
            ::operator delete((void*)memory, LINE);
    }

    template <class U>
    bool operator==(const InHugePages<U>&) const {
        return true;
    }
    template <class U>
    bool operator!=(const InHugePages<U>&) const {
        return false;
    }

   private:
    static constexpr std::align_val_t LINE{64};
    static constexpr size_t PAGE = size_t(2) << 20, LEAST = size_t(64) << 10;

    static bool is_large(size_t count) { return count * sizeof(T) >= LEAST; }
    static size_t bytes_of(size_t count) { return (count * sizeof(T) + PAGE - 1) / PAGE * PAGE; }
};

template <class T>
using HugeVector = std::vector<T, InHugePages<T>>;

// Makes room for `size` elements; a vector that has it stays as it is.
template <class Vector>
void fit(Vector& some, size_t size) {
    if (some.size() < size) some.resize(size);
}

}  // namespace vmp
