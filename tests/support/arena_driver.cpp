// Takes pieces of memory as kernels do, several times, and prints a line for each: the round, its address, its size, and its
// last byte as it was. Then it prints the flags of the mapping that has the last piece (man 5 proc, smaps).

#include "scratch.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

int main() {
    const std::vector<std::vector<long>> rounds = {{3000001, 50000000, 2100001, 100},
                                                   {3000001, 50000000, 2100001, 100},
                                                   {3000001, 50000000, 2100001, 100},
                                                   {90000000, 3000001},
                                                   {90000000, 3000001}};
    unsigned long last = 0;
    for (std::size_t i = 0; i < rounds.size(); i++) {
        std::vector<Memory<char>> pieces;
        for (long bytes : rounds[i]) {
            pieces.push_back(room<char>(bytes));
            last = reinterpret_cast<unsigned long>(pieces.back().get());
            std::printf("%zu %lu %ld %d\n", i, last, bytes, pieces.back()[bytes - 1]);
            std::memset(pieces.back().get(), i + 1, bytes);
        }
        for (auto& piece : pieces) piece.reset();  // the first one first
    }
    std::ifstream maps("/proc/self/smaps");
    bool here = false;
    for (std::string line; std::getline(maps, line);) {
        unsigned long from, to;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) here = from <= last && last < to;
        if (here && line.rfind("VmFlags:", 0) == 0) std::puts(line.c_str());
    }
}
