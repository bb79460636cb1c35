# windows.cmake with clang for x86-64 Windows, and the headers and libraries of Debian's mingw-w64.
include(${CMAKE_CURRENT_LIST_DIR}/windows.cmake)
file(GLOB gcc /usr/lib/gcc/x86_64-w64-mingw32/*-posix)
set(CMAKE_C_COMPILER          clang)
set(CMAKE_CXX_COMPILER        clang++)
set(CMAKE_C_COMPILER_TARGET   x86_64-w64-mingw32)
set(CMAKE_CXX_COMPILER_TARGET x86_64-w64-mingw32)
# clang aligns the stack where it spills vectors. Its variables of a thread have to be those of GCC's libstdc++. clang does not find a
# directory of GCC whose name is not a version.
set(CMAKE_C_FLAGS_INIT   "-femulated-tls -B${gcc}")
set(CMAKE_CXX_FLAGS_INIT "${CMAKE_C_FLAGS_INIT} -isystem ${gcc}/include/c++ -isystem ${gcc}/include/c++/x86_64-w64-mingw32")
foreach (kind IN ITEMS EXE SHARED MODULE)
    set(CMAKE_${kind}_LINKER_FLAGS_INIT "-L${gcc}")
endforeach()
set(CMAKE_C_STANDARD_LIBRARIES   -lpthread)
set(CMAKE_CXX_STANDARD_LIBRARIES -lpthread)
